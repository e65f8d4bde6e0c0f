"""A matplotlib figure as inline SVG that takes its colours from the page it stands on."""

import hashlib
import io
import re
from xml.etree import ElementTree

from IPython.display import display
from matplotlib import pyplot, rc_context

# Colours to draw with. matplotlib knows no CSS, so these stand for what the page decides: they
# are replaced in the SVG. Nothing else may use them.
INK = "#010203"  # text and axes
FAINT = "#040506"  # lines that should not draw the eye
CSS = {INK: "currentColor", "#000000": "currentColor", FAINT: "var(--naranhi-faint,#8c959f)"}
# Where a page does not set --naranhi-ink, its own text colour serves: JupyterLab has dark pages.
ROOT_COLOR = "color:var(--naranhi-ink,currentcolor);fill:currentColor;stroke-linejoin:round"

SVG = "http://www.w3.org/2000/svg"
HREF = "{http://www.w3.org/1999/xlink}href"
ElementTree.register_namespace("", SVG)


def figure(fig, alt, measured=False):
    """Show a matplotlib figure as SVG, and close it.

    alt: what the picture shows, in a sentence, for readers who do not see it.
    measured: True when it draws a measurement, which another run would draw otherwise.
    Raises ValueError without alt.
    """
    data = {"text/html": svg(fig, alt), "text/plain": f"[figure: {alt}]"}
    pyplot.close(fig)
    display(data, metadata={"naranhi": {"measured": True}} if measured else None, raw=True)


def svg(fig, alt):
    """The figure as an <svg> element: text as paths, colours by CSS, ids that no other one has.

    The same figure gives the same bytes.
    """
    root, width, _ = _element(fig, alt)
    root.set("style", f"width:100%;max-width:{width:.0f}px;height:auto;{ROOT_COLOR}")
    return ElementTree.tostring(root, encoding="unicode")


def svg_file(fig, alt):
    """The same as a file of its own, which asks the reader's system whether it is dark."""
    root, width, height = _element(fig, alt)
    root.attrib |= {"width": f"{width:.0f}", "height": f"{height:.0f}", "style": ROOT_COLOR}
    style = ElementTree.Element(f"{{{SVG}}}style")
    style.text = (
        ":root{--naranhi-ink:#1f2328;--naranhi-faint:#8c959f}"
        "@media(prefers-color-scheme:dark){:root{--naranhi-ink:#d6dce2;"
        "--naranhi-faint:#75808b}}"
    )
    root.insert(0, style)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _element(fig, alt):
    """The figure as a parsed <svg> without a size, and its width and height in pixels."""
    if not alt or not alt.strip():
        raise ValueError("a figure needs an alt text: say in a sentence what it shows")
    spread_labels(fig)
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "naranhi", "path.simplify": True}):
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


def spread_labels(fig):
    """Move the labels at the lines' ends (see _chart) apart, each as little as it takes."""
    fig.draw_without_rendering()
    # What has been laid out stays so, or a second drawing of the figure would differ.
    fig.set_layout_engine("none")
    for ax in fig.axes:
        labels = [artist for artist in ax.artists if artist.get_gid() == "label"]
        labels.sort(key=lambda label: label.get_window_extent().y0)
        clusters = []  # of labels that touch: their heights, and the middle each would like
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
    """Drop what draws nothing: metadata, and paths with neither line nor filling."""
    for child in list(element):
        name = child.tag.rpartition("}")[2]
        style = child.get("style", "")
        invisible = name == "path" and "fill: none" in style and "stroke" not in style
        if invisible or name in ("metadata", "style"):
            # matplotlib's <style> speaks of `*`, which on a page would mean all of it.
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
        element.text = element.tail = None
        if HREF in element.attrib:
            element.set("href", element.attrib.pop(HREF))
        if "style" in element.attrib:
            style = element.get("style").replace(": ", ":").replace("; ", ";")
            for sentinel, css in CSS.items():
                style = style.replace(sentinel, css)
            element.set("style", style)
        for name in ("d", "x", "y", "width", "height"):
            if name in element.attrib:
                # A hundredth of a point is invisible; in letters the unit is smaller still.
                element.set(name, re.sub(r"-?\d+\.\d+", _rounded, element.get(name)))
        if "d" in element.attrib:
            element.set("d", re.sub(r"\s*([A-Za-z])\s*", r"\1", element.get("d")))


def _rounded(match):
    text = f"{float(match[0]):.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _rename_ids(root):
    """Ids that begin with a digest of the picture; those that nothing refers to go."""
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
