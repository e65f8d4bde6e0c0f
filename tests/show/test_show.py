import html
import inspect
import itertools
import logging
import math
import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import rc_context

from naranhi import collectives, show
from naranhi.collectives import chunks, ring, tree
from naranhi.show import (
    _collectives,
    _figure,
    _grids,
    _hierarchy,
    _lanes,
    _source,
    _states,
    _table,
    definitions,
)

IMAGES = Path(__file__).parents[2] / "images"


@pytest.fixture
def shown(monkeypatch):
    """What was displayed: (data by MIME type, metadata), in order."""
    outputs = []

    def display(data, raw, metadata=None):
        assert raw
        outputs.append((data, metadata))

    for module in (_figure, _source, _table):
        monkeypatch.setattr(module, "display", display)
    return outputs


def chart():
    fig, ax = show.axes("message size", "time", x="size", y="seconds")
    sizes = [2**power for power in range(12, 27)]
    show.measured(ax, sizes, [1e-4 + s / 2e9 for s in sizes], "ring", show.COLORS[0])
    show.predicted(ax, sizes, [1e-4 + s / 2.2e9 for s in sizes], "a + b x size", show.COLORS[0])
    return fig


# --- numbers and tables --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (
            show.seconds,
            {
                3.2e-5: "32 µs",
                1.0: "1 s",
                0.0999: "99.9 ms",
                1.2345e-3: "1.23 ms",
                9.999e-4: "1 ms",
                4e-9: "4 ns",
                83.4: "83.4 s",
                3600.0: "3,600 s",
                0: "0 s",
                -2e-3: "-2 ms",
                9.995e-4: "1 ms",
                -9.995e-4: "-1 ms",
            },
        ),
        (
            show.size,
            {
                0: "0 B",
                1: "1 B",
                1023: "1,023 B",
                1024: "1 KiB",
                1536: "1.5 KiB",
                2**20: "1 MiB",
                64 * 2**20: "64 MiB",
                2**30 - 1: "1 GiB",
                1000 * 2**20: "1,000 MiB",
                3 * 2**40: "3 TiB",
                10**6: "977 KiB",
            },
        ),
        (
            show.rate,
            {
                3.2e9: "3.2 GB/s",
                1e9: "1 GB/s",
                999.9e6: "1 GB/s",
                2.5e3: "2.5 kB/s",
                12: "12 B/s",
                3.35e12: "3.35 TB/s",
                450e9: "450 GB/s",
                0: "0 B/s",
            },
        ),
    ],
)
def test_numbers_with_units(written, value):
    assert {number: written(number) for number in value} == value


def test_a_rate_of_something_else():
    assert show.rate(4.1e12, "FLOP/s") == "4.1 TFLOP/s"


@given(st.floats(1e-9, 1e15))
def test_a_unit_is_read_back_within_three_digits(value):
    scales = {
        "s": 1,
        "ms": 1e-3,
        "µs": 1e-6,
        "ns": 1e-9,
        "B/s": 1,
        "kB/s": 1e3,
        "MB/s": 1e6,
        "GB/s": 1e9,
        "TB/s": 1e12,
        "PB/s": 1e15,
        "B": 1,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
    }
    for write in (show.seconds, show.rate, show.size):
        number, unit = write(value).split(" ")
        assert float(number.replace(",", "")) * scales[unit] == pytest.approx(value, rel=5.1e-3)
        # The largest unit of which there is one: never 0.5 MiB or 2000 kB/s.
        number = float(number.replace(",", ""))
        assert number >= 1 or unit in ("ns", "B", "B/s")
        assert number < 1024 or unit in ("s", "TiB", "PB/s")


def test_a_table(shown):
    show.table(
        [["ring", 2.5, show.seconds(3.2e-5), None], ["tree <2>", 1200, "1.22 ms", 0.333333]],
        ["algorithm", "n", "time", "ratio"],
        caption="Two & two",
    )
    ((data, metadata),) = shown
    assert metadata is None
    assert data["text/plain"].splitlines() == [
        "Two & two",
        "algorithm      n     time  ratio",
        "---------  -----  -------  -----",
        "ring         2.5    32 µs      —",
        "tree <2>   1,200  1.22 ms  0.333",
    ]
    root = ElementTree.fromstring(data["text/html"])
    cells = [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]
    assert cells[2] == ["tree <2>", "1,200", "1.22 ms", "0.333"]
    assert "".join(root.find(".//caption").itertext()) == "Two & two"
    for row in root.iter("tr"):
        assert [re.search("text-align:(left|right)", cell.get("style"))[1] for cell in row] == [
            "left",
            "right",
            "right",
            "right",
        ]


def test_a_number_stays_with_its_unit(shown):
    show.table([["a long explanation", "20.2 MiB"]], ["why", "bytes that are kept"])
    ((data, _),) = shown
    heading, body = ElementTree.fromstring(data["text/html"]).iter("tr")
    assert ["nowrap" in cell.get("style") for cell in heading] == [False, False]
    assert ["nowrap" in cell.get("style") for cell in body] == [False, True]


def test_a_table_of_dicts(shown):
    show.table([{"b": 2, "a": 1}], ["a", "b"], measured=True)
    ((data, metadata),) = shown
    assert data["text/plain"].splitlines()[-1].split() == ["1", "2"]
    assert metadata == {"naranhi": {"measured": True}}


def test_rows_that_do_not_fit_are_refused(shown):
    with pytest.raises(ValueError, match="3 cells for 2 columns"):
        show.table([[1, 2], [1, 2, 3]], ["a", "b"])
    with pytest.raises(ValueError, match="the columns are"):
        show.table([{"a": 1}], ["a", "b"])
    assert not shown


# --- source --------------------------------------------------------------------------------------


def test_source_shows_what_is_in_the_file(shown):
    show.source(collectives.all_gather, definitions.Block, definitions.ring, _table)
    plain = shown[0][0]["text/plain"]
    for heading, items in (
        ("src/naranhi/collectives/__init__.py · all_gather", [collectives.all_gather]),
        ("src/naranhi/show/definitions.py · Block, ring", [definitions.Block, definitions.ring]),
        ("src/naranhi/show/_table.py", [_table]),
    ):
        text = "\n\n".join(inspect.getsource(item).rstrip() + "\n" for item in items)
        assert f"# {heading}\n{text}" in plain
        assert heading in shown[0][0]["text/html"]
    without_style = re.sub("<style>.*?</style>", "", shown[0][0]["text/html"], flags=re.DOTALL)
    text = html.unescape(re.sub("<[^>]+>", "", without_style))
    assert inspect.getsource(collectives.all_gather) in text


def test_source_of_a_method_is_named_and_moved_to_the_margin(shown):
    show.source(definitions.Block.__add__)
    plain = shown[0][0]["text/plain"]
    assert plain.startswith(
        "# src/naranhi/show/definitions.py · Block.__add__\n"
        "def __add__(self, other: Block) -> Block:\n    return"
    )


def test_source_highlights_by_pygments_classes_and_leaves_the_page_alone(shown):
    show.source(show.seconds)
    text = shown[0][0]["text/html"]
    assert '<div class="highlight">' in text and '<span class="k">def</span>' in text
    style = re.search("<style>(.*)</style>", text, re.DOTALL)[1]
    rules = [line for line in style.splitlines() if line]
    # Every rule is about our own elements, and weighs nothing beside the page's own.
    assert rules and all(rule.startswith(":where(.naranhi-source) :where(") for rule in rules)
    assert not re.search("#[0-9a-f]{6}", text.replace(style, ""))


def test_source_without_docstrings(shown):
    show.source(collectives.all_reduce, definitions, docstrings=False)
    plain = shown[0][0]["text/plain"]
    assert '"""' not in plain
    function, module = plain.split("\n\n# src/naranhi/show/definitions.py\n")
    assert "require_sum(tensor)\n    blocks = ranks" in function
    names = {}
    exec(compile(module, "definitions", "exec"), names)
    assert names["all_reduce"]([[1, 2], [3, 4]]) == [[4, 6], [4, 6]]


def test_source_without_docstrings_keeps_comments():
    text = 'def f():\n    """Doc.\n\n    More.\n    """\n\n    # why\n    return 1\n'
    assert _source._without_docstrings(text) == "def f():\n    # why\n    return 1\n"
    only = 'class A:\n    """Nothing else."""\n'
    assert _source._without_docstrings(only) == only


@pytest.mark.parametrize("item", [torch.nn.Linear, inspect.getsource, len, 3])
def test_source_of_others_is_refused(item, shown):
    with pytest.raises(ValueError, match=r"does not come from src/|no source to show"):
        show.source(item)
    assert not shown


def test_source_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        show.source()


# --- figures -------------------------------------------------------------------------------------


def test_the_same_figure_gives_the_same_bytes():
    assert _figure.svg(chart(), "Time by size") == _figure.svg(chart(), "Time by size")
    fig = chart()
    assert _figure.svg(fig, "Time by size") == _figure.svg(fig, "Time by size")


def test_figures_on_one_page_share_no_id_and_find_their_own():
    other, _ = show.axes("x", "y")
    figures = [
        _figure.svg(chart(), "Time by size"),
        _figure.svg(chart(), "Again"),
        _figure.svg(other, "Empty"),
        _figure.svg(_collectives.draw_ring(3), "Ring"),
    ]
    ids = [re.findall(r'\bid="([^"]+)"', text) for text in figures]
    everything = list(itertools.chain(*ids))
    assert len(set(everything)) == len(everything) > 0
    for text, own in zip(figures, ids, strict=True):
        assert set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text)) <= (
            {(name, "") for name in own} | {("", name) for name in own}
        )


def test_a_figure_takes_its_colours_from_the_page(shown):
    fig = chart()
    fig.axes[0].axhline(1e-3, color="black")  # what matplotlib draws when no one says a colour
    show.figure(fig, 'Time by "size"', measured=True)
    ((data, metadata),) = shown
    assert metadata == {"naranhi": {"measured": True}}
    assert data["text/plain"] == '[figure: Time by "size"]'
    root = ElementTree.fromstring(data["text/html"])
    assert root.get("role") == "img" and root.get("aria-label") == 'Time by "size"'
    assert "width:100%" in root.get("style") and "max-width:518px" in root.get("style")
    colors = set(re.findall(r"(?:fill|stroke):\s*([^;\"]+)", data["text/html"]))
    assert colors == {"none", "currentColor", _figure.CSS[_figure.FAINT], show.COLORS[0]}
    assert "color:var(--naranhi-ink,currentcolor)" in root.get("style")
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags <= {"svg", "g", "defs", "path", "use", "clipPath", "rect", "text"}  # no style
    words = [element.text for element in root.iter() if element.tag.endswith("}text")]
    assert {"message size", "time", "ring"} <= {*words}  # text, and not outlines
    assert "font-family" not in data["text/html"]  # the page has one
    assert len(data["text/html"]) < 30_000


@pytest.mark.parametrize("alt", ["", "  ", None])
def test_a_figure_without_alt_is_refused(alt, shown):
    with pytest.raises(ValueError, match="alt"):
        show.figure(chart(), alt)
    assert not shown


def test_looking_for_fonts_is_no_output(caplog):
    log = logging.getLogger("matplotlib.font_manager")
    log.warning("Matplotlib is building the font cache; this may take a moment.")
    log.warning("findfont: no such font")
    assert [record.message for record in caplog.records] == ["findfont: no such font"]


@pytest.mark.filterwarnings("error")
def test_labels_in_korean_need_no_font_here(shown):
    fig, ax = show.axes("크기", "시간")
    show.measured(ax, [1, 2], [1, 2], "측정")
    show.figure(fig, "측정한 값.")
    show.figure(show.bars({"순전파": 1.0}, "시간"), "막대.")
    assert "측정" in shown[0][0]["text/html"] and "순전파" in shown[1][0]["text/html"]


@pytest.mark.parametrize("own", [{"axes.grid": True, "figure.dpi": 300}, {"text.usetex": True}])
def test_a_style_of_the_readers_changes_no_picture(own):
    def pictures():
        chart, ax = show.axes("bytes", "time", "size", "seconds")
        show.measured(ax, [1, 2], [1, 2], "measured")
        show.predicted(ax, [1, 2], [1, 2], "predicted")
        rows = {"link": [("send", 0, 0, 1)]}
        for picture in (chart, show.bars({"a": 1.0}, "time"), _lanes.draw_lanes(rows)):
            yield _figure.svg(picture, "a picture")

    plain = list(pictures())
    wide = {"font.family": "monospace", "savefig.bbox": "tight", "lines.linestyle": "--"}
    with rc_context({**wide, **own}):
        assert list(pictures()) == plain


def test_a_figure_of_pyplot_is_closed(shown):
    from matplotlib import pyplot

    fig, ax = pyplot.subplots()
    ax.plot([1, 2, 3])
    show.figure(fig, "A line")
    assert not pyplot.fignum_exists(fig.number)


def test_labels_at_lines_ends_do_not_overlap_and_move_little():
    fig, ax = show.axes("x", "y")
    heights = [1.0, 1.001, 1.002, 5.0]
    for height in heights:
        show.predicted(ax, [0, 1], [height, height], f"line {height}")
    _figure.spread_labels(fig)
    fig.draw_without_rendering()
    boxes = [label.get_window_extent() for label in ax.artists]
    boxes.sort(key=lambda box: box.y0)
    assert len(boxes) == 4
    for below, above in itertools.pairwise(boxes):
        assert above.y0 >= below.y1 - 0.01
    ends = [ax.transData.transform((1, height))[1] for height in heights]
    middles = [(box.y0 + box.y1) / 2 for box in boxes]
    assert middles[3] == pytest.approx(ends[3], abs=1)
    assert np.mean(middles[:3]) == pytest.approx(np.mean(ends[:3]), abs=1)


@pytest.mark.parametrize(
    ("scale", "low", "high", "expected"),
    [
        ("size", 2**12, 2**26, ["4 KiB", "64 KiB", "1 MiB", "16 MiB"]),
        ("size", 2**12, 2**16, ["4 KiB", "8 KiB", "16 KiB", "32 KiB", "64 KiB"]),
        ("seconds", 1e-5, 1e-1, ["10 µs", "100 µs", "1 ms", "10 ms", "100 ms"]),
        ("rate", 4e8, 2.2e9, ["500 MB/s", "1 GB/s", "2 GB/s"]),
        ("rate", 1.3e9, 2.2e9, ["1.5 GB/s", "1.75 GB/s", "2 GB/s", "2.25 GB/s"]),
        ("log", 1, 1e9, ["1", "100", "10,000", "1,000,000", "100,000,000"]),
        ("linear", 1, 20, ["5", "10", "15", "20"]),
    ],
)
def test_ticks_are_few_and_round(scale, low, high, expected):
    for axis in "xy":
        fig, ax = show.axes("x", "y", **{axis: scale})
        show.measured(ax, [low, high], [low, high])
        fig.draw_without_rendering()
        visible = getattr(ax, f"get_{axis}lim")()
        ticks = getattr(ax, f"{axis}axis").get_major_ticks()
        assert [
            tick.label1.get_text() for tick in ticks if visible[0] <= tick.get_loc() <= visible[1]
        ] == expected


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="a scale is"):
        show.axes("x", "y", x="bytes")
    for values in ({}, {"a": -1.0}, {"a": float("nan")}):
        with pytest.raises(ValueError, match="from zero"):
            show.bars(values, "time")


def test_a_dollar_is_a_dollar():
    """Between two of them matplotlib expects mathematics, and `\\frob` would be an error."""
    text = r"$1 \frob $2"
    chart, ax = show.axes(text, text)
    show.measured(ax, [1], [1], text)
    pictures = [
        chart,
        show.bars({text: 1.0}, text),
        show.panels([text], {text: ([1], None, None)}),
        _lanes.draw_lanes({text: [(text, None, 0, 1)]}),
        _grids.draw_grids({text: ([[1]], [[0]])}),
        _states.draw_states(text, [(text, "done")]),
    ]
    shown = [_figure.svg(picture, "dollars").count(f">{text}</text>") for picture in pictures]
    assert shown == [3, 2, 2, 2, 1, 2]


def test_bars_are_as_long_as_their_values():
    fig = show.bars({"ours": 0.01, "gloo": 0.02}, "time", show.seconds)
    (ax,) = fig.axes
    assert [bar.get_width() for bar in ax.patches] == [0.01, 0.02]
    assert [bar.get_x() for bar in ax.patches] == [0, 0]
    assert [text.get_text() for text in ax.texts] == ["10 ms", "20 ms"]


LEVEL = {"name": "memory", "bandwidth": 1e10, "capacity": 2**34, "source": "measured"}


def test_a_hierarchy(shown):
    link = {"name": "link", "bandwidth": 4e8, "capacity": None, "source": "datasheet"}
    show.hierarchy([LEVEL, link])
    show.hierarchy([link])
    assert [metadata for _, metadata in shown] == [{"naranhi": {"measured": True}}, None]
    assert (
        "memory 10 GB/s, 16 GiB (measured); link 400 MB/s (datasheet)"
        in (shown[0][0]["text/plain"])
    )
    left, right = _hierarchy.draw([LEVEL, link]).axes
    assert [line.get_xdata()[0] for line in left.lines] == [1e10, 4e8]
    assert [line.get_xdata()[0] for line in right.lines] == [2**34]


@pytest.mark.parametrize(
    "change", [{"source": "guessed"}, {"bandwidth": 0}, {"capacity": -1}, {"color": "red"}]
)
def test_a_level_that_cannot_be_drawn_is_refused(change, shown):
    with pytest.raises(ValueError):
        show.hierarchy([LEVEL | change])
    with pytest.raises(ValueError, match="no level"):
        show.hierarchy([])
    assert not shown


# Linear RGB as seen with a full protanopia, deuteranopia and tritanopia. Source: Machado, Oliveira
# and Fernandes, "A physiologically-based model for simulation of color vision deficiency" (2009).
VISION = {
    "normal": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def linear(color):
    values = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def oklab(rgb):
    """A space where distance is roughly difference to the eye: Ottosson, "A perceptual color space
    for image processing" (2020)."""
    cones = np.cbrt(
        np.clip(rgb, 0, 1)
        @ np.array(
            [
                [0.4122214708, 0.2119034982, 0.0883024619],
                [0.5363325363, 0.6806995451, 0.2817188376],
                [0.0514459929, 0.1073969566, 0.6299787005],
            ]
        )
    )
    return cones @ np.array(
        [
            [0.2104542553, 1.9779984951, 0.0259040371],
            [0.7936177850, -2.4285922050, 0.7827717662],
            [-0.0040720468, 0.4505937099, -0.8086757660],
        ]
    )


@pytest.mark.parametrize("eyes", VISION)
def test_ranks_are_told_apart_by_all_eyes(eyes):
    seen = [oklab(linear(color) @ np.array(VISION[eyes]).T) for color in show.COLORS]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 0.09


@pytest.mark.parametrize("page", ["#ffffff", "#0d1117"])
def test_ranks_stand_out_of_a_light_and_a_dark_page(page):
    weights = np.array([0.2126, 0.7152, 0.0722])
    for color in show.COLORS:
        dark, light = sorted([linear(color) @ weights, linear(page) @ weights])
        assert (light + 0.05) / (dark + 0.05) > 3.5


# --- the collectives -----------------------------------------------------------------------------


def test_definitions_on_numbers():
    held = [[1, 2, 3], [10, 20, 30], [100, 200, 300]]
    sums = [111, 222, 333]
    assert definitions.broadcast(held, root=1) == [[10, 20, 30]] * 3
    assert definitions.scatter(held, root=2) == [[100], [200], [300]]
    assert definitions.gather([[1], [2], [3]], root=1) == [[], [1, 2, 3], []]
    assert definitions.reduce(held, root=1) == [[1, 2, 3], sums, [100, 200, 300]]
    assert definitions.all_gather([[1], [2], [3]]) == [[1, 2, 3]] * 3
    assert definitions.reduce_scatter(held) == [[111], [222], [333]]
    assert definitions.all_reduce(held) == [sums] * 3
    assert definitions.all_to_all(held) == [[1, 10, 100], [2, 20, 200], [3, 30, 300]]


def test_a_block_remembers_what_went_into_it():
    b1, b0 = definitions.block(1, 1), definitions.block(1, 0)
    assert str(b1) == "B1" and str(b1 + b0) == str(b0 + b1) == "B0+B1"


@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_ring_ends_where_the_definition_says(ranks):
    start = definitions.example("all_reduce", ranks)
    steps = definitions.ring(start)
    assert steps[0].held == start and len(steps) == 1 + 2 * (ranks - 1)
    assert steps[-1].held == definitions.all_reduce(start)
    scattered = steps[ranks - 1].held
    assert [scattered[rank][rank] for rank in range(ranks)] == [
        blocks[0] for blocks in definitions.reduce_scatter(start)
    ]


@pytest.mark.parametrize("ranks", range(1, 10))
def test_the_tree_reaches_everyone_once(ranks):
    for root in range(ranks):
        have = {root}
        rounds = definitions.tree(ranks, root)
        assert len(rounds) == (ranks - 1).bit_length()
        for pairs in rounds:
            senders, receivers = [a for a, _ in pairs], [b for _, b in pairs]
            assert len(set(senders)) == len(senders) and set(senders) <= have
            assert not set(receivers) & have
            have |= set(receivers)
        assert have == set(range(ranks))


class Wire:
    """Runs a kernel of every rank in turn in this process, and keeps what each sent in a step."""

    def __init__(self, monkeypatch):
        self.sent, self.awaited, self.steps = {}, {}, []
        monkeypatch.setattr(chunks, "start", self.start)
        monkeypatch.setattr(chunks, "finish", lambda works: None)

    def start(self, group, sends=(), receives=()):
        self.sent |= {(self.rank, peer): tensor.clone() for tensor, peer in sends}
        self.awaited |= {(peer, self.rank): tensor for tensor, peer in receives}
        return []

    def run(self, kernels):
        kernels = dict(enumerate(kernels))
        while kernels:
            waiting = {receiver for _, receiver in self.awaited}
            for self.rank in set(kernels) - waiting:
                if next(kernels[self.rank], "ended") == "ended":
                    del kernels[self.rank]
            self.steps += [dict(self.sent)] if self.sent else []
            arriving = self.sent.keys() & self.awaited.keys()
            assert arriving or not self.awaited, "every rank waits"
            for ends in arriving:
                self.awaited.pop(ends).copy_(self.sent.pop(ends))
            assert not self.sent, "no one receives this"


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_the_ring_shown_sends_what_the_kernel_sends(ranks, monkeypatch):
    def one_hot(block):
        return sum(torch.eye(ranks * ranks)[at * ranks + rank] for at, rank in block.terms)

    start = definitions.example("all_reduce", ranks)
    data = [torch.cat([one_hot(block) for block in blocks]) for blocks in start]
    wire = Wire(monkeypatch)
    wire.run(ring.all_reduce(data[rank], None, rank, ranks) for rank in range(ranks))
    steps = definitions.ring(start)
    assert len(wire.steps) == len(steps) - 1
    for before, after, sent in zip(steps, steps[1:], wire.steps, strict=False):
        assert set(sent) == {(rank, (rank + 1) % ranks) for rank in range(ranks)}
        for (_, rank), message in sent.items():
            at = after.received[rank]
            now = one_hot(after.held[rank][at])
            own = one_hot(before.held[rank][at]) if after.phase == "reduce-scatter" else 0
            assert torch.equal(message, now - own)
    for rank, blocks in enumerate(steps[-1].held):
        assert torch.equal(data[rank], torch.cat([one_hot(block) for block in blocks]))


@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_tree_shown_sends_what_the_kernel_sends(ranks, monkeypatch):
    for root in range(ranks):
        wire = Wire(monkeypatch)
        data = [torch.full((1,), float(rank)) for rank in range(ranks)]
        wire.run(tree.broadcast(data[rank], root, None, rank, ranks) for rank in range(ranks))
        assert [int(value) for value in data] == [root] * ranks
        pairs = list(itertools.chain(*wire.steps))
        assert sorted(pairs) == sorted(itertools.chain(*definitions.tree(ranks, root)))


@pytest.mark.parametrize("name", definitions.COLLECTIVES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_picture_shows_the_definition(name, ranks, shown):
    show.collective(name, ranks)
    assert shown[0][1] is None
    assert f"{name} on {ranks} ranks" in shown[0][0]["text/plain"]
    before = definitions.example(name, ranks)
    after = definitions.COLLECTIVES[name](before)
    (ax,) = _collectives.draw_collective(name, ranks).axes
    texts = [text.get_text() for text in ax.texts]
    expected = [
        str(block) if len(block.terms) == 1 else f"Σ{str(block)[0]}"
        for state in (before, after)
        for blocks in state
        for block in blocks
    ]
    assert [text for text in texts if re.fullmatch(r"[A-D]\d|Σ[A-D]", text)] == expected
    # A bar for every term, in its rank's colour, from left to right.
    colors = [
        show.COLORS[rank]
        for state in (before, after)
        for blocks in state
        for block in blocks
        for _, rank in block.terms
    ]
    drawn = [matplotlib_hex(patch) for patch in ax.patches]
    assert [color for color in drawn if color in show.COLORS] == colors


def matplotlib_hex(patch):
    from matplotlib.colors import to_hex

    return to_hex(patch.get_facecolor())


def test_the_words_of_a_picture(shown):
    show.collective("reduce", ranks=2, root=1)
    assert shown[0][0]["text/plain"] == (
        "[figure: reduce on 2 ranks. Before: rank 0 holds A0, B0; rank 1 holds A1, B1. "
        "After: rank 0 holds A0, B0; rank 1 holds A0+A1, B0+B1.]"
    )
    show.tree(4, root=1)
    assert "round 1: 1 to 3; round 2: 1 to 2, 3 to 0" in shown[1][0]["text/plain"]
    show.ring_steps(3)
    assert "The 4 steps of a ring all-reduce on 3 ranks" in shown[2][0]["text/plain"]


def test_pictures_that_cannot_be_drawn_are_refused(shown):
    for call, words in (
        (lambda: show.collective("all_broadcast"), "a collective is one of"),
        (lambda: show.collective("reduce", ranks=5), "1 to 4 ranks"),
        (lambda: show.collective("reduce", root=4), "root is a rank"),
        (lambda: show.ring_steps(0), "1 to 4 ranks"),
        (lambda: show.tree(4, root=4), "root is a rank"),
        (lambda: show.tree(0), "root is a rank"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert not shown


def test_the_committed_images_are_what_is_drawn():
    drawn = runpy.run_path(str(IMAGES / "draw.py"))["pictures"]()
    assert set(drawn) == {str(path.relative_to(IMAGES)) for path in IMAGES.rglob("*.svg")}
    for name, text in drawn.items():
        assert (IMAGES / name).read_text(encoding="utf-8") == text, f"{name}: run `make images`"
        assert len(text) < 100_000
        ElementTree.fromstring(text)


def test_the_images_of_the_korean_book_speak_korean():
    """But for the names of operations, which are the same in both languages."""
    names = {"reduce-scatter", "all-gather"}
    for path in sorted(IMAGES.glob("*.svg")):
        english, korean = (
            ElementTree.parse(one).getroot() for one in (path, IMAGES / "ko" / path.name)
        )
        assert re.search("[가-힣]", korean.get("aria-label")), path.name
        words = {text.text for text in korean.iter("{http://www.w3.org/2000/svg}text")}
        assert {word for word in words if re.search("[A-Za-z]{2}", word)} <= names, path.name
        drawn = [[one.get("d") for one in root.iter()] for root in (english, korean)]
        assert drawn[0] == drawn[1], path.name


def before(x):
    """Return the sum."""
    total = x + 1
    unchanged = 2
    unchanged += 3
    unchanged += 4
    return total + unchanged


def after(x):
    """Return the sum, of all ranks."""
    total = x + 2
    unchanged = 2
    unchanged += 3
    unchanged += 4
    return [total, unchanged]


def test_changes_are_the_lines_that_go_and_come(monkeypatch, shown):
    monkeypatch.setattr("naranhi.show._source.ROOT", Path(__file__).parents[1])
    show.changes(before, after)
    show.changes(before, (Path(__file__), "after"))
    (data, _), (again, _) = shown
    assert again == data
    assert data["text/plain"].splitlines() == [
        "# src/show/test_show.py, before → src/show/test_show.py, after",
        "-def before(x):",
        "-    total = x + 1",
        "+def after(x):",
        "+    total = x + 2",
        "     unchanged = 2",
        "   ...",
        "     unchanged += 4",
        "-    return total + unchanged",
        "+    return [total, unchanged]",
    ]


def test_two_functions_that_are_the_same_have_no_changes(monkeypatch):
    monkeypatch.setattr("naranhi.show._source.ROOT", Path(__file__).parents[1])
    with pytest.raises(ValueError, match="before is the same as"):
        show.changes(before, before)
    with pytest.raises(ValueError, match=r"test_show.py defines no nothing"):
        show.changes(before, (Path(__file__), "nothing"))


def test_a_table_of_dicts_whose_keys_are_numbers(shown):
    show.table([{2: 1.5, 4: 2.5}], [2, 4])
    assert shown[0][0]["text/plain"].split() == ["2", "4", "---", "---", "1.5", "2.5"]


@pytest.mark.parametrize(
    ("y", "scale", "height"),
    [
        ([3.0, math.nan], "linear", 3.0),
        ([3.0, math.inf], "linear", 3.0),
        ([3.0, 0.0], "log", 3.0),
        ([3.0, -1.0], "log", 3.0),
        ([0.0, 0.0], "log", 0.5),
    ],
)
def test_a_label_is_at_the_last_point_that_is_shown(y, scale, height):
    fig, ax = show.axes("x", "y", y=scale)
    show.measured(ax, [1, 2], y, "label")
    [label] = [artist for artist in ax.artists if artist.get_gid() == "label"]
    assert label.xy == (1, height)
    assert "label" in _figure.svg(fig, "alt")


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_a_single_number_of_an_array_is_written_as_a_number(array, shown):
    loss, steps = array(3.21875), array(12345)
    show.table([["loss", loss], ["steps", steps]], ["name", "value"])
    ((data, _),) = shown
    assert "3.22" in data["text/plain"] and "12,345" in data["text/plain"]
    assert show.seconds(loss) == "3.22 s" and show.size(steps) == "12.1 KiB"
