"""Names and numbers for the tables that cells show (``_ext/naranhi_tables.py`` counts them)."""

import re

TABLE = re.compile(
    r'<table class="naranhi-table"([^>]*)>(<caption[^>]*>(.*?)</caption>)?', re.DOTALL
)


def name_of(cell, chapter: str) -> str | None:
    """Return the name of the table that a cell of a chapter shows first, or None."""
    number = chapter.partition("_")[0]
    for output in cell.get("outputs", []):
        if TABLE.search(output.get("data", {}).get("text/html", "")):
            return f"table-{number}-{cell.id}"
    return None


def numbered(html: str, number: str, anchor: str, permalink: str = "") -> str:
    """Put a number before the caption of the first table in HTML."""

    def table(found: re.Match) -> str:
        attributes, _, caption = found.groups()
        words = f'<span class="caption-text">{caption}</span>' if caption else ""
        return (
            f'<table class="naranhi-table" id="{anchor}"{attributes}>'
            '<caption style="caption-side:top;text-align:left">'
            f'<span class="caption-number">{number} </span>{words}{permalink}</caption>'
        )

    return TABLE.sub(table, html, count=1)
