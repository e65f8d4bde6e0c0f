"""Choose a colour for text on a box that can be read on a light page and on a dark one."""

from matplotlib.colors import to_rgb

from naranhi.show._figure import INK

# The background and the text colour of the site's pages (book/_static/naranhi.css).
PAGES = (("#fdfdfc", "#1f2328"), ("#13171b", "#d6dce2"))
DARK = "#010101"  # not black, which `_figure` replaces by the page's text colour


def luminance(color: str | tuple[float, ...]) -> float:
    """Return how light a colour is, from 0 to 1: WCAG 2.2, "relative luminance"."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str | tuple[float, ...], other: str | tuple[float, ...]) -> float:
    """Return the contrast of two colours, from 1 to 21; small text needs 4.5 (WCAG 2.2)."""
    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


def text_on(color: str, opacity: float = 1) -> str:
    """Return white, `DARK` or `INK`: the most readable on a box, on the page where it is least so.

    Args:
        color: of the box.
        opacity: of the box; below 1 the page shows through.
    """
    return max(("white", DARK, INK), key=lambda text: readability(text, color, opacity))


def readability(text: str, color: str, opacity: float = 1) -> float:
    """Return the contrast of text on a box, on the page where the contrast is lower."""
    contrasts = []
    for page, ink in PAGES:
        mixed = zip(to_rgb(color), to_rgb(page), strict=True)
        box = tuple(opacity * c + (1 - opacity) * p for c, p in mixed)
        contrasts.append(contrast(ink if text == INK else text, box))
    return min(contrasts)
