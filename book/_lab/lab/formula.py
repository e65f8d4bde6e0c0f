"""Formulas as a reader sees them: what stands there with the numbers put in is what is computed."""

import re
from typing import Any


def put_in(text: str, **numbers: float) -> tuple[str, Any]:
    """Return a formula with its numbers put in, and its value.

    Args:
        text: an expression of Python, such as "(p - 1) / (m + p - 1)".
        numbers: by letter or word.
    """
    names = "|".join(map(re.escape, sorted(numbers, key=len, reverse=True)))
    with_numbers = re.sub(rf"\b({names})\b", lambda name: written(numbers[name[0]]), text)
    value = eval(with_numbers, {"__builtins__": {}, "max": max, "min": min})
    return shown(with_numbers), value


def written(number: float) -> str:
    """Return a number as Python writes it, without the point of a whole one."""
    return repr(int(number) if number == int(number) and abs(number) < 1e15 else number)


def shown(text: str) -> str:
    """Return a formula in letters, with the signs of print."""
    return text.replace(" * ", " × ").replace(" - ", " − ")


def output(value: Any, unit: str = "", formula: str = "", **numbers: float) -> dict[str, Any]:
    """Return a result: its value, its unit, and a formula for it with its own value, if any."""
    result = {"value": value, "unit": unit}
    if formula:
        with_numbers, computed = put_in(formula, **numbers)
        result |= {"formula": shown(formula), "put_in": with_numbers, "computed": computed}
    return result
