"""Draw the pictures that do not stand in a notebook: the cover, the mark, the collectives.

`make images` runs this. The files are committed; a test draws them again and compares. What a
picture says in another language is in `book/CODE/outputs/images.yml`, as a chapter's words are
(`book/localize.py`), and the picture in `images/CODE`.
"""

import sys
from pathlib import Path

from matplotlib.patches import Circle, FancyBboxPatch, PathPatch
from matplotlib.path import Path as Line

from naranhi.show import COLORS, definitions
from naranhi.show._blocks import canvas, rank_names
from naranhi.show._collectives import (
    draw_collective,
    draw_messages,
    draw_ring,
    draw_steps,
    draw_tree,
)
from naranhi.show._figure import INK, svg_file

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "book"))

import localize  # noqa: E402
from languages import BY_CODE  # noqa: E402

RANKS = 4
# Columns between two steps of a ring, and from the start of a step to that of the next.
GAP = 2.0
PITCH = RANKS + GAP

# The strokes of 나란히, each syllable in a square of side 1, y counting down; a stroke is a line
# through its points, and (x, y, radius) is a circle.
NARANHI = (
    (
        [(0.06, 0.12), (0.06, 0.76), (0.54, 0.76)],
        [(0.74, 0), (0.74, 1)],
        [(0.74, 0.47), (0.97, 0.47)],
    ),
    (
        [(0.06, 0.03), (0.52, 0.03), (0.52, 0.26), (0.06, 0.26), (0.06, 0.49), (0.56, 0.49)],
        [(0.76, 0), (0.76, 0.62)],
        [(0.76, 0.29), (0.98, 0.29)],
        [(0.16, 0.7), (0.16, 0.98), (0.84, 0.98)],
    ),
    (
        [(0.2, 0.02), (0.44, 0.02)],
        [(0.02, 0.24), (0.62, 0.24)],
        (0.32, 0.64, 0.22),
        [(0.84, 0), (0.84, 1)],
    ),
)


def hero():
    """The name, and a ring all-reduce with every message it sends, in a row."""
    steps = definitions.ring(definitions.example("all_reduce", RANKS))
    fig, ax = canvas(2.3 + PITCH * len(steps) - GAP + 0.1, 5.9 + RANKS + 0.3, 0.27)
    write_name(ax, 0.25, 0.3, 2.4)
    ax.text(9.6, 2.62, "side by side", color=INK, fontsize=15)
    draw_row(ax, steps, range(len(steps)), 2.3, 5.9, size=8.5)
    return fig, (
        f"나란히, side by side: a ring all-reduce on {RANKS} ranks in {len(steps) - 1} "
        "steps. Each rank begins with its own colour and ends with all of them."
    )


def hero_narrow():
    """The same for a phone: reduce-scatter above all-gather, with text that is large enough."""
    steps = definitions.ring(definitions.example("all_reduce", RANKS))
    left, tops = 4.2, (6.1, 13.8)
    fig, ax = canvas(left + PITCH * RANKS - GAP + 0.1, tops[1] + RANKS + 0.3, 0.27)
    write_name(ax, 0.25, 0.3, 2.4)
    ax.text(9.6, 2.62, "side by side", color=INK, fontsize=15)
    draw_row(ax, steps, range(RANKS), left, tops[0], size=15)
    # The last step of the first row is where the second one begins.
    draw_row(ax, steps, range(RANKS - 1, len(steps)), left, tops[1], size=15)
    return fig, hero()[1]


def draw_row(ax, steps, numbers, left, top, size):
    """The ring's steps of these numbers, beside each other; a phase's name above its first."""
    rank_names(ax, RANKS, top, size=size)
    for i, number in enumerate(numbers):
        x = left + PITCH * i
        if number in (0, RANKS):
            phase = "reduce-scatter" if number == 0 else "all-gather"
            ax.text(
                x + 0.05, top - 0.3 - size / 9.4, phase, color=INK, fontsize=size + 1, weight="bold"
            )
        label = f"step {number}" if number else "start"
        ax.text(x + 0.05, top - 0.3, label, color=INK, fontsize=size)
        draw_steps(ax, x, top, steps[number])
        if i:
            draw_messages(ax, x, top, GAP, steps[number])


def write_name(ax, x, y, side):
    """나란히, `side` high."""
    style = {
        "fill": False,
        "edgecolor": INK,
        "linewidth": side * 2.3,
        "capstyle": "round",
        "joinstyle": "round",
        "clip_on": False,
    }
    for i, strokes in enumerate(NARANHI):
        at = x + i * side * 1.26
        for stroke in strokes:
            if isinstance(stroke, tuple):
                cx, cy, radius = stroke
                ax.add_patch(Circle((at + cx * side, y + cy * side), radius * side, **style))
            else:
                ax.add_patch(
                    PathPatch(Line([(at + px * side, y + py * side) for px, py in stroke]), **style)
                )


def mark():
    """A bar of each rank, side by side."""
    fig, ax = canvas(RANKS, RANKS, 0.12)
    for rank, color in enumerate(COLORS):
        ax.add_patch(
            FancyBboxPatch(
                (rank + 0.16, 0.2),
                0.68,
                RANKS - 0.4,
                facecolor=color,
                edgecolor="none",
                clip_on=False,
                boxstyle="round,pad=0,rounding_size=0.3",
            )
        )
    return fig, "Four bars side by side"


def pictures():
    """The text of every picture by its file's name, and by folder where it speaks a language.

    Raises:
        ValueError: a picture says what a language has no words for.
    """
    drawn = {
        "hero": hero(),
        "hero-narrow": hero_narrow(),
        "mark": mark(),
        "ring": (draw_ring(RANKS), f"The steps of a ring all-reduce on {RANKS} ranks"),
        "tree": (draw_tree(RANKS), f"The rounds of a broadcast to {RANKS} ranks"),
    }
    for name in definitions.COLLECTIVES:
        drawn[name] = draw_collective(name, RANKS), f"{name}, before and after, on {RANKS} ranks"
    texts = {f"{name}.svg": svg_file(*picture) for name, picture in drawn.items()}
    said = {}
    for language in BY_CODE:
        catalogue = localize.load(language, ROOT, "images")
        if catalogue:
            said |= {
                f"{language}/{name}": localize.page(text, catalogue) for name, text in texts.items()
            }
            if catalogue.missing:
                where = f"book/{language}/outputs/images.yml"
                raise ValueError(f"{where} does not have {sorted(catalogue.missing)}")
    return texts | said


if __name__ == "__main__":
    for name, text in pictures().items():
        (HERE / name).parent.mkdir(exist_ok=True)
        (HERE / name).write_text(text, encoding="utf-8")
        print(f"images/{name}")
