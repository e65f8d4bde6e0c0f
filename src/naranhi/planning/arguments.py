"""Check arguments that are numbers, of any numeric type (numpy's, too); make whole ones int."""

from numbers import Real
from operator import index


def whole(name: str, value: object, kind: str = "a whole number") -> int:
    """Return a whole number as an int.

    Raises:
        TypeError: If `value` is not a whole number; True and False are not.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {kind}, not {value!r}")
    return index(value)


def make_whole(argument: object, *names: str, optional: tuple[str, ...] = ()) -> None:
    """Convert the named fields of a frozen dataclass to int; `optional` fields may be None.

    Raises:
        TypeError: If one of them is not a whole number.
    """
    for name in names + optional:
        value = getattr(argument, name)
        if value is not None or name in names:
            object.__setattr__(argument, name, whole(name, value))


def check_real(name: str, value: object) -> None:
    """Raise TypeError if a value is not a real number.

    Raises:
        TypeError: If `value` is not a real number; True and False are not.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is a number, not {value!r}")


def check_least(name: str, value: float, least: float) -> None:
    """Raise ValueError if a number is too small.

    Raises:
        ValueError: If `value` is below `least`.
    """
    if value < least:
        raise ValueError(f"{name} is at least {least}, not {value}")
