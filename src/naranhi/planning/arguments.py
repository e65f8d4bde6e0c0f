"""Numbers among arguments: of any type that is one, such as numpy's; whole ones as Python's int."""

from numbers import Real
from operator import index


def whole(name: str, value: object, kind: str = "a whole number") -> int:
    """Return a whole number as an int.

    Raises:
        TypeError: If it is not one; True and False are not.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {kind}, not {value!r}")
    return index(value)


def make_whole(argument: object, *names: str, optional: tuple[str, ...] = ()) -> None:
    """Make those fields of a frozen dataclass ints, and the optional ones that are not None.

    Raises:
        TypeError: If one of them is not a whole number.
    """
    for name in names + optional:
        value = getattr(argument, name)
        if value is not None or name in names:
            object.__setattr__(argument, name, whole(name, value))


def check_real(name: str, value: object) -> None:
    """Raise TypeError, in words, if a value is not a number.

    Raises:
        TypeError: If it is not; True and False are not.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is a number, not {value!r}")


def check_least(name: str, value: float, least: float) -> None:
    """Refuse a number that is too small.

    Raises:
        ValueError: If `value` is below `least`.
    """
    if value < least:
        raise ValueError(f"{name} is at least {least}, not {value}")
