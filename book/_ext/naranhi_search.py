"""Search by section, for Korean and English on one page, in place of Sphinx's search by page.

Sphinx ranks whole chapters, has no Korean, and cuts its excerpts from the navigation. Here the
build writes the sections and the entries of the glossary down, as text, in ``searchsections.js``;
``_static/naranhi-search.js`` looks a query up in them. That is a script and not JSON, so that it
also works from a folder, without a server.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from naranhi_site import plain
from sphinx import addnodes

WORDS = (nodes.paragraph, nodes.caption, nodes.entry, nodes.term)


class Text(nodes.NodeVisitor):
    """Collect a section's prose, and the words of its code and outputs, without subsections."""

    def __init__(self, document: nodes.document) -> None:
        super().__init__(document)
        self.prose: list[str] = []
        self.code: set[str] = set()

    def visit_section(self, node: nodes.Element) -> None:
        raise nodes.SkipNode

    visit_glossary = visit_section

    def unknown_visit(self, node: nodes.Node) -> None:
        if isinstance(node, nodes.literal_block | nodes.raw | nodes.math_block):
            self.code.update(re.findall(r"\w+", re.sub(r"<[^>]*>", " ", node.astext())))
            raise nodes.SkipNode
        if isinstance(node, nodes.title | nodes.comment | nodes.substitution_definition):
            raise nodes.SkipNode
        if isinstance(node, WORDS):
            self.prose.append(plain(node))
            raise nodes.SkipNode

    def unknown_departure(self, node: nodes.Node) -> None:
        pass


def sections(document: nodes.document) -> Iterator[tuple[str, str, str, str]]:
    """Yield (anchor, title, prose, words of code) of each section and glossary entry of a page."""
    for section in document.findall(nodes.section):
        text = Text(document)
        for child in section.children:
            child.walkabout(text)
        title = plain(section.next_node(nodes.title))
        anchor = "" if section.parent is document else section["ids"][0]
        yield anchor, title, "\n".join(filter(None, text.prose)), " ".join(sorted(text.code))
    for glossary in document.findall(addnodes.glossary):
        for entry in glossary.findall(nodes.definition_list_item):
            term = entry.next_node(nodes.term)
            definition = plain(entry.next_node(nodes.definition))
            yield term["ids"][0], term.astext(), definition, ""


def collect(app, doctree: nodes.document, page: str) -> None:
    """Take the sections of a page whose references have been resolved: links have their words."""
    title = plain(app.env.titles[page])
    app.naranhi_sections[page] = [
        [page, anchor, title, *rest] for anchor, *rest in sections(doctree)
    ]


def write(app, exception) -> None:
    """Write the sections of all pages down."""
    if exception or app.builder.name != "html":
        return
    rows = [row for page in sorted(app.naranhi_sections) for row in app.naranhi_sections[page]]
    text = f"const SECTIONS = {json.dumps(rows, ensure_ascii=False, separators=(',', ':'))};\n"
    Path(app.outdir, "searchsections.js").write_text(text, encoding="utf-8")
    Path(app.outdir, "searchindex.js").unlink(missing_ok=True)


def setup(app) -> dict:
    app.naranhi_sections = {}
    app.connect("doctree-resolved", collect)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
