"""What the texts of options mean; argparse tells what a text is not."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import isfinite


def whole(least: int) -> Callable[[str], int]:
    """Return what reads a whole number of at least `least`."""

    def number(text):
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return number


def balance(text: str) -> list[int]:
    """Read numbers of layers, such as "4,3,3,4"."""
    return [whole(1)(part) for part in text.split(",")]


def _number(text):
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def positive(text: str) -> float:
    """Read a number above 0."""
    if not (isfinite(number := _number(text)) and number > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def probability(text: str) -> float:
    """Read a probability below 1."""
    if not 0 <= (probability := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a probability below 1")
    return probability
