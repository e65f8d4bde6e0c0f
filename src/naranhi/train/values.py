"""Parse the values of options; argparse reports the values that are not valid."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import isfinite

MOST = 2**31 - 1  # the largest count
LARGEST = 3e38  # in fp32
FASTEST = 1e37  # a learning rate, which Adam divides by 1 - 0.9


def whole(least: int) -> Callable[[str], int]:
    """Return a function that reads a whole number of at least `least`."""

    def number(text):
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        if int(text) > MOST:
            raise argparse.ArgumentTypeError(f"{text} is more than {MOST:,}")
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


def rate(text: str) -> float:
    """Read a learning rate."""
    if (number := positive(text)) > FASTEST:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {FASTEST:g}, too much for Adam")
    return number


def positive(text: str) -> float:
    """Read a number above 0."""
    if not (isfinite(number := _number(text)) and 0 < number <= LARGEST):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 that fits in fp32")
    return number


def path(text: str) -> str:
    """Read a path; reject an empty one (an unset variable), which would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the value is empty; name a path")
    return text


def probability(text: str) -> float:
    """Read a probability below 1."""
    if not 0 <= (probability := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a probability below 1")
    return probability
