"""Render a matplotlib figure as inline SVG that takes its colours from the page around it."""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from IPython.display import display
from matplotlib import pyplot, rc_context, rcParamsDefault, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours to draw with. matplotlib has no CSS, so these colours are placeholders for the page's
# colours and are replaced in the SVG. Nothing else may use them.
INK = "#010203"  # text and axes
FAINT = "#040506"  # lines that should not attract attention
CSS = {INK: "currentColor", "#000000": "currentColor", FAINT: "var(--naranhi-faint,#8c959f)"}
# A page without --naranhi-ink provides its own text colour: JupyterLab has dark pages.
ROOT_COLOR = "color:var(--naranhi-ink,currentcolor);fill:currentColor;stroke-linejoin:round"

# Decorates what draws, so that no style and no matplotlibrc of the reader's changes a picture.
house_style = style.context("default")

SVG = "http://www.w3.org/2000/svg"
TEXT = {f"{{{SVG}}}text", f"{{{SVG}}}tspan"}
HREF = "{http://www.w3.org/1999/xlink}href"
ElementTree.register_namespace("", SVG)


def figure(fig: Figure, alt: str, measured: bool = False) -> None:
    """Show a matplotlib figure as SVG, and close it.

    Args:
        fig: the figure.
        alt: a sentence that says what the picture shows, for readers who do not see it.
        measured: True if the figure shows a measurement, which differs from one run to the next.

    Raises:
        ValueError: `alt` is empty.
    """
    data = {"text/html": svg(fig, alt), "text/plain": f"[figure: {alt}]"}
    pyplot.close(fig)
    display(data, metadata={"naranhi": {"measured": True}} if measured else None, raw=True)


def literal(text: Any) -> str:
    """Return a text for matplotlib to write as it is: between two $ it expects mathematics."""
    return re.sub(r"(?<!\\)\$", r"\\$", str(text))


def svg(fig: Figure, alt: str) -> str:
    """Return the figure as an <svg> element: text as text, colours by CSS, unique ids.

    The same figure yields the same bytes.
    """
    root, width, _ = svg_root(fig, alt)
    root.set("style", f"width:100%;max-width:{width:.0f}px;height:auto;{ROOT_COLOR}")
    return ElementTree.tostring(root, encoding="unicode")


def svg_file(fig: Figure, alt: str) -> str:
    """Return the figure as an SVG file, which follows the reader's light or dark mode."""
    root, width, height = svg_root(fig, alt)
    look = f"{ROOT_COLOR};font-family:system-ui,sans-serif"  # a file has no page with a font
    root.attrib |= {"width": f"{width:.0f}", "height": f"{height:.0f}", "style": look}
    style = ElementTree.Element(f"{{{SVG}}}style")
    style.text = (
        ":root{--naranhi-ink:#1f2328;--naranhi-faint:#8c959f}"
        "@media(prefers-color-scheme:dark){:root{--naranhi-ink:#d6dce2;"
        "--naranhi-faint:#75808b}}"
    )
    root.insert(0, style)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def svg_root(fig, alt):
    """Return the figure as a parsed <svg> without a size, and its width and height in pixels."""
    if not alt or not alt.strip():
        raise ValueError("a figure needs an alt text: say in a sentence what it shows")
    buffer = io.StringIO()
    settings = {"svg.fonttype": "none", "svg.hashsalt": "naranhi", "path.simplify": True}
    for name in ("font.family", "font.sans-serif", "savefig.bbox", "text.usetex"):
        settings[name] = rcParamsDefault[name]
    with rc_context(settings), warnings.catch_warnings():
        # The page has the fonts, and with them the letters that matplotlib's own font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        spread_labels(fig)
        fig.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
        )
    root = ElementTree.fromstring(buffer.getvalue())
    size = [
        float(root.attrib.pop(side).removesuffix("pt")) * 96 / 72 for side in ("width", "height")
    ]
    del root.attrib["version"]
    _prune(root)
    _shorten(root)
    root.set("role", "img")
    root.set("aria-label", " ".join(alt.split()))
    _rename_ids(root)
    return root, *size


def spread_labels(fig: Figure) -> None:
    """Move the labels at the lines' ends (see `_chart`) apart, each as little as possible."""
    fig.draw_without_rendering()
    # Freeze the layout, or a second drawing of the figure would differ.
    fig.set_layout_engine("none")
    for ax in fig.axes:
        labels = [artist for artist in ax.artists if artist.get_gid() == "label"]
        labels.sort(key=lambda label: label.get_window_extent().y0)
        clusters = []  # of labels that touch: (labels, height of a label, desired middles)
        for label in labels:
            box = label.get_window_extent()
            clusters.append(([label], box.height, [(box.y0 + box.y1) / 2]))
            while len(clusters) > 1 and _bottom(clusters[-1]) < _top(clusters[-2]):
                (above, height, middles), (below, _, others) = clusters.pop(), clusters.pop()
                clusters.append((below + above, height, others + middles))
        for cluster, height, middles in clusters:
            for i, (label, middle) in enumerate(zip(cluster, middles, strict=True)):
                y = _bottom((cluster, height, middles)) + height * (i + 0.5)
                x, before = label.xybox
                label.xybox = (x, before + (y - middle) * 72 / fig.dpi)
                label.set_gid("placed")


def _bottom(cluster):
    labels, height, middles = cluster
    return sum(middles) / len(middles) - height * len(labels) / 2


def _top(cluster):
    return _bottom(cluster) + cluster[1] * len(cluster[0])


def _prune(element):
    """Remove what draws nothing: metadata, and paths with neither stroke nor fill."""
    for child in list(element):
        name = child.tag.rpartition("}")[2]
        style = child.get("style", "")
        invisible = name == "path" and "fill: none" in style and "stroke" not in style
        if invisible or name in ("metadata", "style"):
            # matplotlib's <style> selects `*`, which on a page would match everything.
            element.remove(child)
            continue
        _prune(child)
        if name in ("g", "defs") and not len(child):
            element.remove(child)
        elif name == "g" and not set(child.attrib) - {"id"}:
            at = list(element).index(child)
            element.remove(child)
            for i, grandchild in enumerate(child):
                element.insert(at + i, grandchild)


def _shorten(root):
    for element in root.iter():
        element.tail = None
        if element.tag in TEXT:
            _shorten_text(element)
        else:
            element.text = None
        if HREF in element.attrib:
            element.set("href", element.attrib.pop(HREF))
        if "style" in element.attrib:
            style = element.get("style").replace(": ", ":").replace("; ", ";")
            for sentinel, css in CSS.items():
                style = style.replace(sentinel, css)
            element.set("style", style)
        for name in ("d", "x", "y", "width", "height"):
            if name in element.attrib:
                # A hundredth of a point is invisible; inside letters the unit is even smaller.
                element.set(name, re.sub(r"-?\d+\.\d+", _rounded, element.get(name)))
        if "d" in element.attrib:
            element.set("d", re.sub(r"\s*([A-Za-z])\s*", r"\1", element.get("d")))


def _shorten_text(element):
    """Leave the choice of the font to the page, and remove default values."""
    if not (element.text or "").strip() and len(element):
        element.text = None
    style = re.sub(r"font-family: [^;]*;? ?|text-anchor: start;? ?", "", element.get("style", ""))
    turned = re.sub(r"-?\d+\.\d+", _rounded, element.get("transform", ""))
    for name, value in (("style", style.removesuffix("; ")), ("transform", turned)):
        element.attrib.pop(name, None)
        if value and not value.startswith("rotate(-0 "):
            element.set(name, value)


def _rounded(match):
    text = f"{float(match[0]):.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _rename_ids(root):
    """Prefix ids with a digest of the picture; remove ids that nothing refers to."""
    text = ElementTree.tostring(root, encoding="unicode")
    prefix = "n" + hashlib.sha256(text.encode()).hexdigest()[:8]
    used = dict.fromkeys(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text))
    names = {a or b: f"{prefix}-{i}" for i, (a, b) in enumerate(used)}
    for element in root.iter():
        old = element.attrib.pop("id", None)
        if old in names:
            element.set("id", names[old])
        for key, value in element.attrib.items():
            if key == "href" or "url(#" in value:
                element.set(
                    key, re.sub(r"(^|url\()#([^)]+)", lambda m: f"{m[1]}#{names[m[2]]}", value)
                )
