"""What a notebook puts on a page: source, tables, figures and the pictures of collectives.

Everything here looks right on a light and on a dark page, at phone width too, and is the same to
the byte for the same data; an output that holds a measurement is marked as one in its metadata.
"""

from naranhi.show._chart import COLORS, axes, bars, measured, predicted
from naranhi.show._collectives import collective, ring_steps, tree
from naranhi.show._figure import figure
from naranhi.show._hierarchy import hierarchy
from naranhi.show._source import source
from naranhi.show._table import rate, seconds, size, table

__all__ = ["COLORS", "axes", "bars", "collective", "figure", "hierarchy", "measured", "predicted",
           "rate", "ring_steps", "seconds", "size", "source", "table", "tree"]
