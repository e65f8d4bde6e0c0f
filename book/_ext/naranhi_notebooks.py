"""Chapters as notebooks that read everywhere, for the download button.

In JupyterLab, in Colab and on GitHub nobody resolves MyST's roles: "In {numref}`fig-a`, the
{term}`ranks <rank>` ..." stays as it is. Here each role becomes the words and the number that the
page shows, a figure gets its caption in a cell below, and the outputs are those of the page.
"""

import re
from pathlib import Path
from typing import Any

import naranhi_site  # noqa: F401 (it puts the book's modules in reach)
import nbformat
from docutils import nodes
from languages import BY_CODE
from nbformat.v4 import new_code_cell, new_markdown_cell
from tables import TABLE, numbered

FOLDER = "notebooks"  # below each language's pages
# Where a work can be read, by the field of its entry in references.bib; the first that it has.
HOSTS = {"url": "", "doi": "https://doi.org/", "eprint": "https://arxiv.org/abs/"}
ROLE = re.compile(r"\{(term|cite:[pt]|numref|eq|ref|doc)\}`([^`]+)`")
LINK = re.compile(r"\[([^\]]*)\]\((\w+)\.(ipynb|md)(#[^)]*)?\)")
BLOCK = re.compile(r"^(:{3,}|`{3,})\{(\w+)\} *([^\n]*)\n(.*?)^\1 *$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^% (\w+): *(.*)$", re.MULTILINE)
FORMULA = re.compile(r"\$\$(.+?)\$\$ *\(([\w:-]+)\)", re.DOTALL)


class Resolver:
    """Turn the text of a Markdown cell into plain Markdown, by what Sphinx knows of the book."""

    def __init__(self, app: Any) -> None:
        self.env, self.config = app.env, app.config
        self.entries = {
            citation.key: citation.entry for citation in app.env.get_domain("cite").citations
        }
        self.roles = {
            "term": self._term,
            "cite:t": self._cite_in_text,
            "cite:p": self._cite,
            "numref": self._numref,
            "eq": lambda label: f"({self._equation(label)})",
            "ref": self._ref,
            "doc": self._doc,
        }

    def text(self, source: str) -> str:
        source = re.sub(r"^\([\w-]+\)=\n?", "", source, flags=re.MULTILINE)
        source = BLOCK.sub(self._block, source)
        source = FORMULA.sub(
            lambda found: f"$${found[1].rstrip()} \\tag{{{self._equation(found[2])}}}$$", source
        )
        source = ROLE.sub(self._role, source)
        return LINK.sub(self._link, source)

    def figure(self, caption: str, name: str | None = None) -> str:
        """Return a caption; only a figure with a name has a number."""
        words = self.text(caption)
        return f"*{self._numref(name)}. {words}*" if name else f"*{words}*"

    def number(self, cell: nbformat.NotebookNode, name: str) -> None:
        for output in cell.outputs:
            html = output.get("data", {}).get("text/html", "")
            if TABLE.search(html):
                output.data["text/html"] = numbered(html, self._numref(name), name)
                return

    def _role(self, found: re.Match) -> str:
        try:
            return self.roles[found[1]](found[2])
        except KeyError:  # it leads nowhere: Sphinx has said so, and the build fails with that
            return found[0]

    def _block(self, found: re.Match) -> str:
        _, kind, title, body = found.groups()
        if kind == "math":
            label = re.search(r":label: *(\S+)\n", body)
            body = body.replace(label[0], "") if label else body
            tag = f" \\tag{{{self._equation(label[1])}}}" if label else ""
            return f"$$\n{body.strip()}{tag}\n$$"
        if kind == "lab":  # lives in the page only
            return ""
        body = re.sub(r"\A(?::\w+:[^\n]*\n)+", "", body).strip()
        if kind == "dropdown":
            return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"
        comments, body = re.fullmatch(r"((?:% [^\n]*\n)*)(.*)", body, re.DOTALL).groups()
        body = body.strip() + self._limits(dict(COMMENT.findall(comments)))
        return "\n".join(f"> {line}".rstrip() for line in (f"**{title}**", "", *body.split("\n")))

    def _limits(self, asked: dict[str, str]) -> str:
        """Say between what the answer to a prediction lies, or what there is to choose from."""
        if "choices" in asked:
            return f" ({' / '.join(choice.strip() for choice in asked['choices'].split('|'))})"
        if "range" not in asked:
            return ""
        bounds = asked["range"].split()
        if len(bounds) != 2:  # Sphinx has warned of it
            return ""
        between = BY_CODE[self.config.language].predict["range"].format(*bounds)
        return f" ({between}, {asked['unit']})" if "unit" in asked else f" ({between})"

    def _equation(self, label: str) -> str:
        page, _ = self.env.get_domain("math").equations[label]
        number = self.env.toc_fignumbers[page]["displaymath"][nodes.make_id(f"equation-{label}")]
        return ".".join(map(str, number))

    def _term(self, content: str) -> str:
        return re.sub(r"\s*<[^>]*>$", "", content)

    def _numref(self, content: str) -> str:
        text, label = self._split(content)
        page, target = self.env.get_domain("std").anonlabels[label]
        for kind, targets in self.env.toc_fignumbers[page].items():
            if target in targets:
                words = text or self.config.numfig_format[kind]
                number = ".".join(map(str, targets[target]))
                return words.replace("%s", number).replace("{number}", number)
        raise KeyError(label)  # it has no number

    def _ref(self, content: str) -> str:
        text, label = self._split(content)
        page, target = self.env.get_domain("std").anonlabels[label]
        words = text or self.env.get_domain("std").labels[label][2]
        return f"[{words}]({page}.ipynb#{target})" if page[0].isdigit() else words

    def _doc(self, content: str) -> str:
        text, page = self._split(content)
        return self._page(text or self.env.titles[page].astext(), page)

    def _cite_in_text(self, keys: str) -> str:
        return ", ".join(f"{who} [{year}]" for who, year in map(self._work, keys.split(",")))

    def _cite(self, keys: str) -> str:
        works = "; ".join(f"{who}, {year}" for who, year in map(self._work, keys.split(",")))
        return f"[{works}]"

    def _work(self, key: str) -> tuple[str, str]:
        """Return (authors, year) as the text cites a work; the year leads to it, where it can."""
        entry = self.entries[key.strip()]
        people = entry.persons.get("author") or entry.persons.get("editor") or []
        names = [" ".join(map(str, person.prelast_names + person.last_names)) for person in people]
        names = [re.sub(r"[{}\\]", "", name) for name in names]
        fields, year = entry.fields, entry.fields.get("year", "")
        for field, host in HOSTS.items():
            if field in fields:
                year = f"[{year}]({host}{fields[field]})"
                break
        return f"{names[0]} et al." if len(names) > 2 else " and ".join(names), year

    def _link(self, found: re.Match) -> str:
        text, page, _, anchor = found.groups()
        if not text and page not in self.env.titles:  # as `_role` has it
            return found[0]
        text = text or self.env.titles[page].astext()
        return self._page(text, page, anchor or "")

    def _page(self, text: str, page: str, anchor: str = "") -> str:
        """Return a link to a page: to the notebook beside this one, or into the site if there is
        an address of it; else the words."""
        if page[0].isdigit():
            return f"[{text}]({page}.ipynb{anchor})"
        address = self.config.html_baseurl
        return f"[{text}]({address}{page}.html{anchor})" if address else text

    def _split(self, content: str) -> tuple[str, str]:
        both = re.fullmatch(r"(.+?)\s*<([^>]+)>", content, re.DOTALL)
        return (both[1], both[2]) if both else ("", content)


def readers(notebook: nbformat.NotebookNode, resolver: Resolver, address: str):
    """Return a chapter as a reader gets it, with a first cell that installs the book's package."""
    cells = []
    if address:
        cells.append(
            new_code_cell(f'%pip install -q "naranhi[book] @ git+{address}"', id="install")
        )
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            if text := resolver.text(cell.source).strip():
                cells.append(new_markdown_cell(text, id=cell.id))
            continue
        cells.append(cell)
        if name := cell.metadata.get("naranhi", {}).get("table"):
            resolver.number(cell, name)
        figure = cell.metadata.get("mystnb", {}).get("figure", {})
        if figure.get("caption"):
            caption = resolver.figure(figure["caption"], figure.get("name"))
            cells.append(new_markdown_cell(caption, id=f"{cell.id}-caption"[:64]))
    return nbformat.from_dict({**notebook, "cells": cells})


def write(app, exception) -> None:
    """Write each chapter's notebook beside its page."""
    if exception or app.builder.name != "html":
        return
    resolver, folder = Resolver(app), Path(app.outdir, FOLDER)
    folder.mkdir(exist_ok=True)
    address = app.config.html_theme_options.get("repository_url", "")
    listed = {page for pages in app.env.toctree_includes.values() for page in pages}
    for source in sorted(Path(app.srcdir).glob("*.ipynb")):
        if source.stem not in listed:  # its figures have no numbers, and Sphinx has warned
            continue
        notebook = readers(nbformat.read(source, as_version=4), resolver, address)
        nbformat.write(notebook, folder / source.name)


def setup(app) -> dict:
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
