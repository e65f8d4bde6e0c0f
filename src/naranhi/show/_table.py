"""Show tables, and write numbers with their units."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from IPython.display import display

TIMES = [(1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s")]
DECIMAL = [(1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T"), (1e15, "P")]
BINARY = [(1, "B"), (2**10, "KiB"), (2**20, "MiB"), (2**30, "GiB"), (2**40, "TiB")]
NUMBER = re.compile(r"[-+−~<>≤≥±]?\s*\d|—$|nan|inf")


def seconds(value: float) -> str:
    """Write a time in seconds, with three digits in the unit that suits it: 3.2e-5 -> '32 µs'."""
    return _with_unit(value, TIMES)


def size(bytes: float) -> str:
    """Write a number of bytes in binary units, where 1 KiB is 1024 bytes: 2**20 -> '1 MiB'."""
    return _with_unit(bytes, BINARY)


def rate(per_second: float, unit: str = "B/s") -> str:
    """Write a rate in decimal units, where 1 GB/s is 10**9 bytes a second: 3.2e9 -> '3.2 GB/s'.

    Args:
        per_second: the rate.
        unit: its unit, as in rate(4.1e12, "FLOP/s") -> '4.1 TFLOP/s'.
    """
    return _with_unit(per_second, [(scale, prefix + unit) for scale, prefix in DECIMAL])


def _with_unit(value, units):
    """Write three significant digits, in the largest unit in which the value is 1 or more."""
    value = plain(value)
    if value == 0 or not math.isfinite(value):
        return f"{number(value)} {dict(units)[1]}"
    for (scale, unit), (larger, _) in pairwise([*units, (math.inf, None)]):
        # Round before choosing the unit: 999.9 µs is 1 ms and not 1000 µs.
        if abs(_rounded(value / scale)) * scale < larger:
            return f"{number(value / scale)} {unit}"
        # In the larger unit a tie may be rounded down: 999.5 µs is not 0.999 ms.
        value = math.copysign(max(abs(value), larger), value)


def _rounded(value):
    return float(f"{value:.3g}") if abs(value) < 999.5 else round(value, 0)


def plain(value: Any) -> Any:
    """Return a single number of torch or NumPy as Python's, and anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def number(value: Any) -> str:
    """Write a number with three significant digits; if larger, to the unit, with commas: 1,234.

    Integers are written in full, None as a dash and anything else as its str.
    """
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "—" if value is None else str(value)
    if not math.isfinite(value):
        return str(value)
    value = value if isinstance(value, int) else _rounded(value)
    if value == int(value):
        return f"{int(value):,}"
    mantissa, _, exponent = f"{value:.3g}".partition("e")
    return mantissa + (f"e{int(exponent)}" if exponent else "")


def table(
    rows: Iterable[Sequence[Any] | dict[str, Any]],
    columns: Iterable[Any],
    caption: str | None = None,
    measured: bool = False,
) -> None:
    """Show a table, as HTML and as plain text.

    Args:
        rows: a sequence per row, or a dict by column name. Floats are written with three digits,
            integers in full, None as a dash, anything else as its str. A column of numbers only
            (with or without units) is aligned to the right.
        columns: the headings.
        caption: a line above the table.
        measured: True if the table holds a measurement, which differs from one run to the next.

    Raises:
        ValueError: a row does not fit the columns.
    """
    columns = [str(column) for column in columns]
    cells = [_row(row, columns) for row in rows]
    numeric = [
        bool(cells) and all(NUMBER.match(row[i]) for row in cells) for i in range(len(columns))
    ]
    display(
        {
            "text/html": _html(cells, columns, numeric, caption),
            "text/plain": _plain(cells, columns, numeric, caption),
        },
        metadata={"naranhi": {"measured": True}} if measured else None,
        raw=True,
    )


def _row(row, columns):
    if isinstance(row, dict):
        row = {str(column): cell for column, cell in row.items()}
        if set(row) != set(columns):
            raise ValueError(f"a row has {sorted(row)}, the columns are {sorted(columns)}")
        row = [row[column] for column in columns]
    row = list(row)
    if len(row) != len(columns):
        raise ValueError(f"a row of {len(row)} cells for {len(columns)} columns: {row}")
    return [number(cell) for cell in row]


def _html(cells, columns, numeric, caption):
    def line(tag, row, border):
        # "20.2 MiB" broken into two lines is hard to read; a heading may have two lines.
        kept_whole = "white-space:nowrap;" if tag == "td" else ""
        return (
            "<tr>"
            + "".join(
                f'<{tag} style="text-align:{"right" if right else "left"};padding:.3em .8em;'
                f"{kept_whole if right else ''}background:transparent;"
                f'border:0;border-bottom:{border}">{html.escape(cell)}</{tag}>'
                for cell, right in zip(row, numeric, strict=True)
            )
            + "</tr>"
        )

    rule = "solid var(--naranhi-faint,#8c959f)"
    head = (
        f'<caption style="caption-side:top;text-align:left">{html.escape(caption)}</caption>'
        if caption
        else ""
    )
    body = "".join(line("td", row, f"1px {rule}") for row in cells)
    return (
        '<div style="overflow-x:auto"><table class="naranhi-table" style="border-collapse:'
        f'collapse;font-variant-numeric:tabular-nums;margin:.5em 0">{head}'
        f"<thead>{line('th', columns, f'2px {rule}')}</thead><tbody>{body}</tbody>"
        "</table></div>"
    )


def _plain(cells, columns, numeric, caption):
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in [columns, ["-" * width for width in widths], *cells]
    ]
    return "\n".join([caption, *lines] if caption else lines)
