"""Labs: pages in which the book's own code answers the reader, by Pyodide, after a click.

    ```{lab} schedule
    :schedule: gpipe
    :microbatches: 4
    ```

puts a lab of a kind into a page, with these values in its fields (``book/_lab/lab`` has the kinds
and their fields). What stands there first, and on paper, and without scripts, is the picture or the
table that the build makes of the same values by the package. ``:proof:`` names the section whose
checks prove what the lab computes, where it is not the kind's usual one.
"""

import hashlib
import io
import json
import shutil
import sys
import zipfile
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any, ClassVar

import naranhi_site  # noqa: F401 (it puts the book's modules in reach)
import yaml
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

BOOK = Path(__file__).resolve().parent.parent
SOURCE = BOOK.parent / "src"
for place in (BOOK / "_lab", SOURCE):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

import lab  # noqa: E402
import localize  # noqa: E402
import pyodide  # noqa: E402

# The section whose checks prove what a kind computes.
PROOFS = {
    "schedule": "06-measured",
    "collectives": "03-true",
    "activations": "07-formula",
    "zero": "12-held",
    "puzzle": "10-exercises",
    "planning": "23-published",
}
PACKAGES = ("schedules", "costs", "planning")
TABLES = ("calibrations.csv", "engines.csv", "gpus.csv")  # not the runs that calibrate the planner
MOST_CHUNKS = 8  # with a look of their own
ITEMS = "07_activation_memory"  # whose outputs name the items of the activations' table


def catalogue(language: str) -> dict[str, Any]:
    """Return what the labs say in a language."""
    path = BOOK / language / "lab.yml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def outputs_in(language: str) -> localize.Catalogue:
    """Return the catalogue of outputs in a language; an empty one for the code's own."""
    from naranhi.show._timeline import KINDS

    found = localize.load(language, BOOK.parent, ITEMS)
    if found is None:
        return localize.Catalogue({})
    words = catalogue(language)
    kinds = {word: words["kinds"][kind] for kind, (word, _) in KINDS.items()}
    chunk = {"chunk {}": words["texts"]["chunk"].replace("{chunk}", "{}")}
    return localize.Catalogue({**found.entries, **kinds, **chunk})


def looks() -> dict[str, Any]:
    """Return how `show.timeline` draws each kind of action, by the chunks of a rank."""
    from naranhi.show._contrast import text_on
    from naranhi.show._figure import CSS
    from naranhi.show._timeline import KINDS, _fill  # matplotlib, which no other page needs

    def look(color, chunk, chunks):
        text = text_on(color, _fill(chunk, chunks))
        return [_fill(chunk, chunks), CSS.get(text, text)]

    return {
        kind: {
            "color": color,
            "chunks": [
                [look(color, chunk, chunks) for chunk in range(chunks)]
                for chunks in range(1, MOST_CHUNKS + 1)
            ],
        }
        for kind, (_, color) in KINDS.items()
    }


@lru_cache
def modules() -> tuple[str, bytes]:
    """Return the modules that answer in the page, as a zip, and its name with their hash."""
    files = [SOURCE / "naranhi" / "__init__.py"]
    for package in PACKAGES:
        files += (SOURCE / "naranhi" / package).glob("*.py")
    files += [SOURCE / "naranhi" / "planning" / "data" / name for name in TABLES]
    named = {path.relative_to(SOURCE).as_posix(): path for path in files}
    named |= {f"lab/{path.name}": path for path in (BOOK / "_lab" / "lab").glob("*.*")}
    result = io.BytesIO()
    with zipfile.ZipFile(result, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(named):
            archive.writestr(zipfile.ZipInfo(name), named[name].read_bytes(), zipfile.ZIP_DEFLATED)
    return f"naranhi-{digest(result.getvalue())}.zip", result.getvalue()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


@lru_cache
def page_catalogue(language: str) -> tuple[str, bytes]:
    """Return what a page needs besides the modules, as JSON, and its name with its hash."""
    from naranhi.costs import transformer_layer_items

    words = outputs_in(language)
    names = [item.item for item in transformer_layer_items(2, 1, 4, 2)]
    content = {
        **catalogue(language),
        "modules": modules()[0],
        "runtime": f"pyodide-{pyodide.VERSION}",
        "looks": looks(),
        "words": {name: words.say(name) for name in names},
    }
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    return f"catalogue-{digest(text)}.json", text


class Lab(SphinxDirective):
    """``{lab} KIND``, with its fields as options."""

    required_arguments = 1
    has_content = False
    option_spec: ClassVar = {
        **{
            field.name: directives.unchanged
            for kind in lab.KINDS
            for field in lab.module(kind).FIELDS
        },
        "proof": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        kind = self.arguments[0]
        values = {name: value for name, value in self.options.items() if name != "proof"}
        if kind not in PROOFS:
            raise self.error(f"there is no lab of the kind {kind!r}; these are {', '.join(PROOFS)}")
        answer = json.loads(lab.answer(json.dumps({"lab": kind, "values": values})))
        if "error" in answer and kind != "puzzle":
            raise self.error(f"the {kind} lab cannot begin with {values}: {answer['error']}")
        language = self.config.language
        words = catalogue(language)
        number = self.env.new_serialno(f"lab-{kind}")
        name = f"lab-{kind}" + f"-{number}" * bool(number)
        sizes = pyodide.sizes(BOOK.parent)
        attributes = {
            "id": name,
            "class": "naranhi-lab",
            "data-lab": kind,
            "data-state": "static",
            "data-values": json.dumps(values),
            "data-catalogue": page_catalogue(language)[0],
            "data-loading": words["texts"]["loading"],
            "data-failed": words["errors"]["failed"],
            "data-served": words["texts"]["served"],
        }
        opened = " ".join(f'{key}="{escape(value)}"' for key, value in attributes.items())
        title = escape(words["titles"][kind])
        html = (
            f'<div {opened} role="group" aria-label="{title}">'
            f'<p class="naranhi-lab-title">{title}</p>'
            f'<div class="naranhi-lab-picture">{picture(kind, answer, language)}</div>'
        )
        if sizes:
            size = words["run"].format(least=f"{sizes[1] / 1e6:.1f}", most=f"{sizes[0] / 1e6:.0f}")
            html += (
                '<p class="naranhi-lab-start" hidden><button type="button" data-run>'
                f"{escape(words['start'])}</button>"
                f' <span aria-live="polite">{escape(size)}</span></p>'
                f'<noscript><p class="naranhi-lab-failed">{escape(words["texts"]["script"])}</p>'
                "</noscript>"
            )
        result = [nodes.raw("", html, format="html")]
        proof = self.options.get("proof", PROOFS[kind])
        if proof:
            text = words["proof"].format(reference=f"{{ref}}`{proof}`")
            paragraphs = self.parse_text_to_nodes(text)
            for paragraph in paragraphs:
                paragraph["classes"] = ["naranhi-lab-proof"]
            result += paragraphs
        return [*result, nodes.raw("", "</div>", format="html")]


def picture(kind: str, answer: dict[str, Any], language: str) -> str:
    """Return what stands in a page before anything is loaded: a timeline or a table, as HTML."""
    words = catalogue(language)
    if kind == "puzzle":
        return ""
    if kind == "schedule":
        return timeline(answer, words, language)
    from naranhi.show import _table

    head = [words["columns"].get(name, name) for name, _ in answer["table"]["columns"]]
    units = [unit for _, unit in answer["table"]["columns"]]
    outputs = outputs_in(language)
    rows = [
        [_table.number(written(cell, unit)) for cell, unit in zip(row, units, strict=True)]
        for row in answer["table"]["rows"]
    ]
    rows = [[outputs.say(row[0], required=kind == "activations"), *row[1:]] for row in rows]
    numeric = [False] + [True] * (len(head) - 1)
    return _table._html(rows, head, numeric, None)


def written(value: Any, unit: str) -> Any:
    """Return a value with its unit, in the way of `show.table`."""
    from naranhi.show import _table

    write = {"s": _table.seconds, "B": _table.size, "%": lambda part: f"{part:.1%}"}.get(unit)
    return value if write is None or value is None else write(value)


def timeline(answer: dict[str, Any], words: dict[str, Any], language: str) -> str:
    """Return the picture of `show.timeline` in a language."""
    from naranhi.schedules import Action, Span, Timeline
    from naranhi.show._figure import svg
    from naranhi.show._timeline import draw_timeline, row_in_words

    line = Timeline(
        [Span(Action.parse(name), start, end) for name, _, _, start, end, *_ in row]
        for row in answer["timelines"][0]["rows"]
    )
    outputs = outputs_in(language)
    rows = [outputs.describe(row_in_words(rank, row)) for rank, row in enumerate(line)]
    said = words["picture"].format(ranks=len(line), bubble=f"{float(line.bubble_rate):.0%}")
    drawn = localize.page(svg(draw_timeline(line), "picture"), outputs)
    return drawn.replace('aria-label="picture"', f'aria-label="{escape(" ".join([said, *rows]))}"')


def page_scripts(app, pagename, templatename, context, doctree) -> None:
    """Load the script of two kilobytes that waits for a click, on pages with a lab."""
    if doctree is not None and 'class="naranhi-lab"' in context["body"]:
        app.add_js_file("lab/start.js", type="module")
        app.add_js_file("lab/served.js", defer="defer")
        app.naranhi_labs = True


def copy(app, exception) -> None:
    """Put what labs load beside the other static files of the site."""
    if exception or not app.naranhi_labs or not pyodide.sizes(BOOK.parent):
        return
    static = Path(app.outdir, "_static")
    for name, content in (modules(), page_catalogue(app.config.language)):
        (static / "lab" / name).write_bytes(content)
    source, target = pyodide.folder(BOOK.parent), static / f"pyodide-{pyodide.VERSION}"
    left = shutil.ignore_patterns("manifest.json")
    shutil.copytree(source, target, ignore=left, dirs_exist_ok=True)


def setup(app) -> dict:
    app.naranhi_labs = False
    app.add_directive("lab", Lab)
    app.connect("html-page-context", page_scripts, priority=600)
    app.connect("build-finished", copy)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
