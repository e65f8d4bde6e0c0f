"""What a notebook puts on a page: source, tables, figures and the pictures of collectives.

Everything here looks right on a light and on a dark page, at phone width too, and is the same to
the byte for the same data; an output that holds a measurement is marked as one in its metadata.
"""

# ruff: noqa: E402
import logging

# On a machine where matplotlib is new it may announce, on stderr, that it looks for fonts: in a
# notebook that would be an output that differs from one run to the next.
logging.getLogger("matplotlib.font_manager").addFilter(
    lambda record: "building the font cache" not in record.getMessage()
)

from naranhi.show._chart import COLORS, axes, bars, measured, predicted
from naranhi.show._collectives import collective, ring_steps, tree
from naranhi.show._figure import figure
from naranhi.show._grids import grids
from naranhi.show._hierarchy import hierarchy
from naranhi.show._journey import journey
from naranhi.show._lanes import lanes
from naranhi.show._panels import panels
from naranhi.show._play import play
from naranhi.show._source import source
from naranhi.show._table import rate, seconds, size, table
from naranhi.show._timeline import timeline

__all__ = [
    "COLORS",
    "axes",
    "bars",
    "collective",
    "figure",
    "grids",
    "hierarchy",
    "journey",
    "lanes",
    "measured",
    "panels",
    "play",
    "predicted",
    "rate",
    "ring_steps",
    "seconds",
    "size",
    "source",
    "table",
    "timeline",
    "tree",
]
