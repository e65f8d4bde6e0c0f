"""Read the tables of this package."""

from csv import DictReader
from importlib.resources import files


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a table of this package."""
    with (
        files("naranhi.planning").joinpath("data", name).open(newline="", encoding="utf-8") as file
    ):
        return list(DictReader(file))
