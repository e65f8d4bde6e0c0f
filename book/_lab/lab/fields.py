"""What a reader can set, and how the text that they typed becomes an argument."""

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple


class InputError(Exception):
    """Something that the page has words for, in the reader's language.

    Args:
        code: which of the catalogue's messages.
        values: what is put into its places.
    """

    def __init__(self, code: str, **values: Any):
        super().__init__(f"{code}: {values}")
        self.code, self.values = code, values


class Field(NamedTuple):
    """A field of a lab, named as the parameter of the package that it becomes.

    Args:
        name: the parameter.
        kind: "whole", "number", "times" (a number, or one for each virtual stage), "choice",
            "text" or "file".
        default: the text that stands in the field at first; "" where the parameter may be None.
        low: the least number.
        high: the largest number.
        slider: the two ends of a slider and its step, where there is one.
        choices: what can be chosen.
        only: [another field, the values of it with which this one counts]; None if it always does.
    """

    name: str
    kind: str
    default: str = ""
    low: float = 0
    high: float = 1e15
    slider: Sequence[float] | None = None
    choices: Sequence[str] = ()
    only: Sequence[Any] | None = None


def parse(fields: Sequence[Field], values: dict[str, str]) -> dict[str, Any]:
    """Return the arguments by name.

    Raises:
        InputError: a text is no number, a number is out of range, a choice is unknown.
    """
    unknown = values.keys() - {field.name for field in fields}
    if unknown:
        raise InputError("unknown_field", name=", ".join(sorted(unknown)))
    return {field.name: _argument(field, values.get(field.name, field.default)) for field in fields}


def _argument(field, text):
    if field.kind in ("text", "file"):
        return text
    if field.kind == "choice":
        if text not in field.choices:
            raise InputError("no_choice", name=field.name, value=text)
        return text
    if not text.strip():
        if field.default:
            raise InputError("no_number", name=field.name, value=text)
        return None
    if field.kind == "times":
        times = [_number(field, part) for part in text.replace(",", " ").split()]
        return times[0] if len(times) == 1 else times
    return _number(field, text.strip())


def _number(field, text):
    try:
        number = int(text)
    except ValueError:
        try:
            number = float(text)
        except ValueError:
            raise InputError("no_number", name=field.name, value=text) from None
    if field.kind == "whole" and number != int(number if isfinite(number) else 0):
        raise InputError("no_whole_number", name=field.name, value=text)
    if not field.low <= number <= field.high:
        raise InputError(
            "out_of_range", name=field.name, value=text, low=field.low, high=field.high
        )
    return int(number) if field.kind == "whole" else number
