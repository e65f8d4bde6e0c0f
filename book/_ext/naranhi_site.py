"""What the theme lacks: a switch between the languages, the stamp of what executed a chapter,
buttons that appear only when the repository has an address, labels of folded cells, definitions of
terms where they are used, and MathJax and an icon served from the site itself.

What differs between the languages is in ``book/languages.py``.
"""

import html
import importlib.util
import json
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import quote

from docutils import nodes
from myst_nb.sphinx_ import HideCodeCellNode
from pydata_sphinx_theme.utils import get_theme_options_dict
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx_external_toc.collectors import TocTreeCollectorWithStyles

BOOK = Path(__file__).resolve().parent.parent
if str(BOOK) not in sys.path:  # by hand, `jupyter-book build` has only the folder of extensions
    sys.path.insert(0, str(BOOK))

from languages import BY_CODE  # noqa: E402

ICONS = re.compile(r"\s*<!--[^>]*custom icons -->\s*<script[^>]*/fontawesome\.js[^>]*></script>")
SEARCH_TOOLS = re.compile(
    r"<script[^>]*/?(?:searchtools|language_data|searchindex)\.js[^>]*></script>"
)
# How an address says "this file of that branch", by where the repository is.
SOURCES = {
    "https://github.com/": "blob",
    "https://gitlab.com/": "-/blob",
    "https://codeberg.org/": "src/branch",
}
# What stays in a line with a formula: what opens right before it, and all up to the next blank.
OPENS = re.compile(r"[(\[{‘“「『《]+$")
FOLLOWS = re.compile(r"\S+")
# A symbol of a formula, in the group; the rest takes no room.
SYMBOL = re.compile(r"\\(?:text|mathrm|operatorname)\b|[{}\s_^]|(\\[A-Za-z]+|\\?.)")
PHONE = 35  # symbols in a line of a phone; a syllable of Hangul is as wide as two
SUMMARY = re.compile(r"(?<=<summary>)[^<]+(?=</summary>)")  # of a fold in the text, of a record
CHECK = re.compile(r"\bcheck\.\w+\(")
EXERCISE = re.compile(r"(\d+)\. ")  # the bold words with which an exercise begins
MATHJAX = ["tex-chtml.js", "input/tex/extensions", "output/chtml/fonts/woff-v2"]


def icon() -> str:
    """Four bars side by side, one for each rank, as the address of an SVG image."""
    bars = "".join(
        f'<rect x="{4 + 7 * rank}" y="{3 + 2 * rank}" width="4" height="{26 - 4 * rank}" rx="2"/>'
        for rank in range(4)
    )
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32" fill="#1b93a8">{bars}</svg>'
    return "data:image/svg+xml," + quote(svg)


def configure(app, config) -> None:
    config.templates_path.insert(0, str(BOOK / "_templates"))
    config.html_static_path.append(str(BOOK / "_static"))
    config.html_css_files.append("naranhi.css")
    config.html_js_files.append("naranhi.js")
    config.mathjax_path = "mathjax/tex-chtml.js"
    # Each formula has a menu: in the order of Tab they would be a hundred stops of a page.
    menu = {"menuOptions": {"settings": {"inTabOrder": False}}}
    config.mathjax3_config = {**config.mathjax3_config, "options": menu}
    address = config.html_theme_options.get("repository_url", "")
    if address:
        app.tags.add("repository")
    config.myst_substitutions = {**config.myst_substitutions, "repository_url": address}


def copy_mathjax(app) -> None:
    """Put the parts of MathJax that a page loads beside the other static files of the site."""
    [package] = importlib.util.find_spec("sphinx-mathjax-offline").submodule_search_locations
    for part in MATHJAX:
        source = Path(package, "static/mathjax", part)
        target = Path(app.outdir, "_static/mathjax", part)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)


def remove_unused(app, exception) -> None:
    """Remove what the theme copies and no page loads."""
    for file in Path(app.outdir, "_static/scripts").glob("fontawesome.js*"):
        file.unlink()
    Path(app.outdir, ".buildinfo").unlink(missing_ok=True)


def number_by_file(app) -> None:
    """Give a chapter the number that its file has: addresses, numbers and references agree."""
    assign = TocTreeCollectorWithStyles.assign_section_numbers

    def with_file_numbers(self, env) -> list[str]:
        changed = assign(self, env)
        for page, numbers in env.toc_secnumbers.items():
            if chapter := re.match(r"\d+", page):
                first = int(chapter[0])
                numbers.update({k: (first, *n[1:]) for k, n in numbers.items() if n})
                for node in (env.titles[page], *env.tocs[page].findall(nodes.reference)):
                    if node.get("secnumber"):
                        node["secnumber"] = [first, *node["secnumber"][1:]]
        return changed

    TocTreeCollectorWithStyles.assign_section_numbers = with_file_numbers


class ExplicitAnchors(SphinxTransform):
    """A section's address is its explicit target, where it has one: the same in both languages."""

    default_priority = 870  # when all targets are known, before tables of contents are made (880)

    def apply(self, **kwargs) -> None:
        for section in self.document.findall(nodes.section):
            explicit = [
                self.document.nameids[name]
                for name in section["names"]
                if self.document.nametypes.get(name)
            ]
            section["ids"].sort(key=lambda target: target not in explicit)


class FoldLabels(SphinxPostTransform):
    """Give each fold a label in the page's language, which says what is in it, and which it is.

    A label that a page has twice says its exercise or its section, and after that is counted.
    """

    default_priority = 200  # right after MyST-NB folds (199)
    formats = ("html",)

    def run(self, **kwargs) -> None:
        self.words = BY_CODE[self.config.language].fold
        folds = []  # (node, labels, where it stands)
        heading = number = cell = None
        for node in self.document.findall():
            if isinstance(node, nodes.title) and isinstance(node.parent, nodes.section):
                heading, number = node.astext(), None
            elif isinstance(node, nodes.strong) and (exercise := EXERCISE.match(node.astext())):
                number = exercise[1]
            elif isinstance(node, nodes.container) and node.get("nb_element") == "cell_code":
                cell = node
            elif isinstance(node, HideCodeCellNode):
                labels, said = self._labels(node["prompt_show"], cell, number)
                folds.append((node, labels, "" if said else self._place(heading, number)))
            elif isinstance(node, nodes.raw) and (summary := SUMMARY.search(node.astext())):
                folds.append((node, [html.unescape(summary[0])], self._place(heading, number)))
        for (node, *_), labels in zip(folds, self._told_apart(folds), strict=True):
            if isinstance(node, HideCodeCellNode):
                node["prompt_show"], node["prompt_hide"] = labels
            else:
                label = html.escape(labels[0], quote=False)
                new = SUMMARY.sub(lambda _, label=label: label, node.astext(), count=1)
                node.children = [nodes.Text(new)]
                node.rawsource = new

    def _labels(self, kind, cell, number) -> tuple[list[str], bool]:
        """Labels (closed, open) of a folded cell, and whether they say where it stands."""
        metadata = cell.get("cell_metadata", {})
        what = number
        if kind == "content" and number:
            kind = "given" if "set-up" in metadata.get("tags", []) else "answer"
        elif kind == "source":
            figure = metadata.get("mystnb", {}).get("figure", {}).get("name")
            if what := self._numbered(figure or metadata.get("naranhi", {}).get("table")):
                kind = "drawing"
            else:
                code = next(iter(cell.findall(nodes.literal_block))).astext()
                kind = "check" if CHECK.search(code) else "set-up"
        labels = [label.format(what) for label in self.words[kind]]
        return labels, kind in ("given", "answer", "drawing")

    def _numbered(self, name) -> str | None:
        """Return "Figure 2.3", of the name of what a cell shows."""
        page, target = self.env.get_domain("std").anonlabels.get(name, (None, None))
        for kind, targets in self.env.toc_fignumbers.get(page, {}).items():
            if target in targets:
                return self.config.numfig_format[kind] % ".".join(map(str, targets[target]))
        return None

    def _place(self, heading, number) -> str:
        return self.words["exercise"].format(number) if number else heading or ""

    def _told_apart(self, folds) -> list[list[str]]:
        """Return the labels, of which no two are the same."""
        times = Counter(labels[0] for _, labels, _ in folds)
        keys = [(labels[0], place) for _, labels, place in folds]
        of, seen, apart = Counter(keys), Counter(), []
        for (_, labels, place), key in zip(folds, keys, strict=True):
            seen[key] += 1
            more = [place] if place and times[labels[0]] > 1 else []
            if of[key] > 1:
                more.append(self.words["part"].format(seen[key], of[key]))
            apart.append([" · ".join([label, *more]) for label in labels])
        return apart


class JoinedFormulas(SphinxPostTransform):
    """Keep a formula in a line together with its punctuation, or the particle that follows it.

    To a browser a formula is a picture, and a line may break on either side of it. It still may
    where both together are wider than a phone.
    """

    default_priority = 20
    formats = ("html",)

    def run(self, **kwargs) -> None:
        for parent in {formula.parent for formula in self.document.findall(nodes.math)}:
            rest, parent.children = list(parent.children), []
            while rest:
                for child in self._next(rest):
                    parent.append(child)

    def _next(self, rest):
        """Take children from `rest`: a formula with what belongs to it as one, or another child."""
        child, together = rest.pop(0), []
        if not isinstance(child, nodes.math):
            opens = isinstance(child, nodes.Text) and OPENS.search(child)
            if not opens or not rest or not isinstance(rest[0], nodes.math):
                return [child]
            together = [nodes.Text(opens[0])]
            before = [nodes.Text(child[: opens.start()])] if opens.start() else []
            child = rest.pop(0)
        else:
            before = []
        together.append(child)
        while rest:
            if isinstance(rest[0], nodes.math):
                together.append(rest.pop(0))
            elif isinstance(rest[0], nodes.Text) and (follows := FOLLOWS.match(rest[0])):
                together.append(nodes.Text(follows[0]))
                text = rest.pop(0)[follows.end() :]
                if text:
                    rest.insert(0, nodes.Text(text))
                    break
            else:
                break
        if len(together) == 1 or symbols(together) > PHONE:
            return [*before, *together]
        return [*before, nodes.inline("", "", *together, classes=["naranhi-joined"])]


def symbols(parts: list[nodes.Node]) -> int:
    """About how wide formulas and text are, in symbols."""
    width = 0
    for part in parts:
        if isinstance(part, nodes.math):
            width += sum(map(bool, SYMBOL.findall(part.astext())))
        else:
            width += sum(2 if character > "\u1100" else 1 for character in part)
    return width


class Definitions(SphinxPostTransform):
    """Let a term say its definition when a pointer rests on it."""

    default_priority = 20  # right after references are resolved (10)
    formats = ("html",)
    page = "glossary"

    def run(self, **kwargs) -> None:
        if self.page not in self.env.all_docs or self.env.docname == self.page:
            return
        definitions = definitions_of(self.env.get_doctree(self.page))
        for reference in self.document.findall(nodes.reference):
            term = next(iter(reference.findall(nodes.inline)), None)
            address = reference.get("refuri", "").partition("#")[2]
            if term is not None and "std-term" in term["classes"] and address in definitions:
                reference["reftitle"] = definitions[address]


def definitions_of(glossary: nodes.document) -> dict[str, str]:
    """What each term means, by its address on the page; not where it takes a formula to say it."""
    return {
        address: " ".join(item.next_node(nodes.definition).astext().split())
        for item in glossary.findall(nodes.definition_list_item)
        if not any(item.findall(nodes.math))
        for term in item.findall(nodes.term)
        for address in term["ids"]
    }


def plain(node: nodes.Element) -> str:
    """The text of a node in one line. Of a formula that takes commands of TeX it has "…" only."""
    copy = node.deepcopy()
    for formula in [*copy.findall(nodes.math)]:
        if "\\" in formula.astext():
            formula.replace_self(nodes.Text("…"))
    return " ".join(copy.astext().split())


def description(doctree) -> str:
    """The beginning of the first paragraph, for search engines and previews."""
    text = next((plain(paragraph) for paragraph in doctree.findall(nodes.paragraph)), "")
    return text if len(text) <= 160 else text[:157].rpartition(" ")[0] + " …"


def mark_ranks(body: str) -> str:
    """Give ``%%ranks``, the ranks named before a line of output, and ✓ a class of their own."""
    magic = '<span class="o">%%</span><span class="n">ranks</span>'
    body = body.replace(magic, '<b class="naranhi-rank">%%ranks</b>')
    rank = r"(?m)(^|<span></span>)(\[ranks? [\d, -]+\])"
    body = re.sub(rank, r'\1<b class="naranhi-rank">\2</b>', body)
    return re.sub(r"(?m)(^|<span></span>|</b> )✓ ", r'\1<b class="naranhi-check">✓</b> ', body)


def page_context(app, pagename, templatename, context, doctree) -> None:
    language = app.config.language
    metadata = app.env.metadata.get(pagename, {})
    is_notebook = "kernelspec" in metadata
    record = json.loads(metadata.get("naranhi", "{}"))  # MyST-NB hands metadata on as text
    options = get_theme_options_dict(app)
    repository = options.get("repository_url", "").rstrip("/")
    colab, source = "", ""
    for host, way in SOURCES.items():
        if repository.startswith(host) and pagename in app.env.all_docs:
            place = f"notebooks/{language}/{pagename}.ipynb"
            if not is_notebook:
                place = f"book/{language}/{pagename}.md"
            source = f"{repository}/{way}/{options['repository_branch']}/{place}"
    if repository.startswith("https://github.com/") and is_notebook:
        path = f"blob/{options['repository_branch']}/notebooks/{language}/{pagename}.ipynb"
        name = repository.removeprefix("https://github.com/")
        colab = f"https://colab.research.google.com/github/{name}/{path}"
    if doctree is not None:
        body = mark_ranks(context["body"])
        # A list whose children are no items is none.
        body = body.replace(
            '<div role="list" class="citation-list">', '<div class="citation-list">'
        )
        # The label would be read aloud in place of the text beneath it, and is English.
        context["body"] = body.replace('<summary aria-label="Toggle hidden content">', "<summary>")
    context["naranhi"] = {
        "colab": colab,
        "executed": record.get("executed"),
        "recorded": record.get("recorded", []),
        "description": description(doctree) if doctree is not None else "",
        "icon": icon(),
        "without_icon_script": lambda head: ICONS.sub("", head),
        "without_search_tools": lambda scripts: SEARCH_TOOLS.sub("", scripts),
        "notebook": f"notebooks/{pagename}.ipynb" if is_notebook else "",
        "repository": repository,
        "source": source,
        "twins": [
            {"address": f"../{code}/{pagename}.html", "language": code, "name": twin.name}
            for code, twin in BY_CODE.items()
            if code != language
        ],
    }


def setup(app) -> dict:
    app.connect("config-inited", configure, priority=400)
    app.connect("builder-inited", copy_mathjax)
    app.connect("builder-inited", number_by_file)
    app.connect("html-page-context", page_context, priority=400)
    app.connect("build-finished", remove_unused)
    app.add_transform(ExplicitAnchors)
    app.add_post_transform(FoldLabels)
    app.add_post_transform(JoinedFormulas)
    app.add_post_transform(Definitions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
