"""Show source, tables, figures and pictures of collectives on a notebook's page.

All output looks right on a light and on a dark page, also at phone width, and is identical to the
byte for the same data. Output that contains a measurement is marked as one in its metadata.
"""

# ruff: noqa: E402
import logging

# On its first run on a machine, matplotlib may log to stderr that it builds its font cache. In a
# notebook, that output would differ from one run to the next.
logging.getLogger("matplotlib.font_manager").addFilter(
    lambda record: "building the font cache" not in record.getMessage()
)

from naranhi.show._answer import answer
from naranhi.show._chart import axes, bars, measured, predicted
from naranhi.show._collectives import collective, ring_steps, tree
from naranhi.show._colors import COLORS
from naranhi.show._figure import figure
from naranhi.show._grids import grids
from naranhi.show._hierarchy import hierarchy
from naranhi.show._journey import journey
from naranhi.show._lanes import lanes
from naranhi.show._panels import panels
from naranhi.show._play import play
from naranhi.show._source import changes, source
from naranhi.show._states import states
from naranhi.show._table import rate, seconds, size, table
from naranhi.show._timeline import timeline

__all__ = [
    "COLORS",
    "answer",
    "axes",
    "bars",
    "changes",
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
    "states",
    "table",
    "timeline",
    "tree",
]
