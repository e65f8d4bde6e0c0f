"""What the theme lacks: a switch between the languages, the stamp of what executed a chapter,
buttons that appear only when the repository has an address, labels of folded cells, definitions of
terms where they are used, and MathJax and an icon served from the site itself.

What differs between the languages is in ``book/languages.py``.
"""

import importlib.util
import json
import re
import shutil
import sys
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
    """Give a folded cell a label in the page's language, by what is folded."""

    default_priority = 200  # right after MyST-NB folds (199)
    formats = ("html",)

    def run(self, **kwargs) -> None:
        language = BY_CODE[self.config.language]
        number = None
        for node in self.document.findall():
            if isinstance(node, nodes.title):
                number = None
            elif isinstance(node, nodes.strong) and (exercise := EXERCISE.match(node.astext())):
                number = exercise[1]
            elif isinstance(node, HideCodeCellNode):
                kind = node["prompt_show"]
                if kind == "content" and number:
                    labels = [label.format(number) for label in language.fold["answer"]]
                else:
                    labels = language.fold[kind]
                node["prompt_show"], node["prompt_hide"] = labels


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


def description(doctree) -> str:
    """The beginning of the first paragraph, for search engines and previews."""
    text = next(
        (" ".join(paragraph.astext().split()) for paragraph in doctree.findall(nodes.paragraph)), ""
    )
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
    (twin,) = BY_CODE.keys() - {language}
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
        "twin": f"../{twin}/{pagename}.html",
        "twin_language": twin,
        "twin_name": BY_CODE[twin].name,
    }


def setup(app) -> dict:
    app.connect("config-inited", configure, priority=400)
    app.connect("builder-inited", copy_mathjax)
    app.connect("builder-inited", number_by_file)
    app.connect("html-page-context", page_context, priority=400)
    app.connect("build-finished", remove_unused)
    app.add_transform(ExplicitAnchors)
    app.add_post_transform(FoldLabels)
    app.add_post_transform(Definitions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
