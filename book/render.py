"""Lay one language's pages out in a folder, and render that folder by Sphinx.

``_build/stage/LANGUAGE/`` is a Jupyter Book of its own: pages and chapters side by side, the
chapters with the outputs of their executed notebook, ``_toc.yml`` with its part titles translated.
"""

import gc
import importlib.metadata
import json
import shutil
import sys
from pathlib import Path
from urllib.parse import urlsplit

import execution
import localize
import nbformat
import pyodide
import records
import tables
import yaml
from execution import digest
from jupyter_book.config import get_final_config
from languages import BY_CODE, LANGUAGES
from nbconvert.preprocessors.coalescestreams import CoalesceStreamsPreprocessor
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

HERE = Path(__file__).resolve().parent
# Jupyter Book loads it for every book, and it names another host on every page.
UNUSED = {"sphinx_thebe"}
# What is of use at a public address only.
PUBLIC = ["sphinx_sitemap", "sphinxext.opengraph"]
LANDING = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>TITLE</title>
<link rel="icon" href="data:,">
<style>
  html { color-scheme: light dark; font: 1.25rem/1.6 system-ui, sans-serif }
  body { min-height: 90vh; display: grid; place-content: center; text-align: center }
  a { margin: 0 1rem }
</style>
<script>
  const codes = CODES;
  const wanted = (navigator.languages || [navigator.language])
    .map((tag) => tag.slice(0, 2)).find((tag) => codes.includes(tag)) || codes[0];
  location.replace(wanted + "/ROOT.html");
</script>
<h1>TITLE</h1>
<p>LINKS</p>
</html>
"""
NOT_FOUND = (
    LANDING[: LANDING.index("<script>")]
    + """<script>
  const codes = CODES;
  const parts = location.pathname.split("/");
  const at = parts.findIndex((part) => codes.includes(part));
  const book = at < 0 ? "BASE" || parts.slice(0, -1).join("/") : parts.slice(0, at).join("/");
  document.write(`<base href="${book}/">`);
</script>
<h1>404</h1>
MISSING
<p>LINKS</p>
</html>
"""
)


def landing(first: str) -> str:
    """The page that leads to the book in the reader's language; `first` is its first page."""
    return _outside(LANDING, first)


def not_found(first: str, address: str = "") -> str:
    """The page that a server shows for an address that does not exist, at any depth.

    Args:
        first: the book's first page.
        address: that of the book, where it is published. Without one, an address that names no
            language is taken for one of the book's own folder.
    """
    return _outside(NOT_FOUND.replace("BASE", urlsplit(address).path.rstrip("/")), first)


def _outside(page, first):
    """Fill in a page that belongs to no language."""
    links = "\n".join(
        f'<a lang="{code}" hreflang="{code}" href="{code}/ROOT.html">{BY_CODE[code].name}</a>'
        for code in reversed(BY_CODE)
    )
    title = " · ".join(language.title for language in reversed(LANGUAGES))
    codes = json.dumps([language.code for language in LANGUAGES])
    missing = "\n".join(
        f'<p lang="{language.code}">{language.not_found}</p>' for language in reversed(LANGUAGES)
    )
    parts = {"TITLE": title, "LINKS": links, "MISSING": missing, "CODES": codes, "ROOT": first}
    for name, text in parts.items():
        page = page.replace(name, text)
    return page


def with_outputs(source: Path, root: Path, language: str):
    """A chapter in its own language's words, with the outputs of the one execution, matched by id,
    and with what machines with GPUs recorded.

    Returns:
        The notebook, and the texts of its outputs that nobody has said in this language.

    Raises:
        ValueError: a code cell that the executed notebook does not have.
    """
    notebook = nbformat.read(source, as_version=4)
    executed = execution.load(source.stem, root)
    # A kernel may send a line in two parts.
    executed, _ = CoalesceStreamsPreprocessor().preprocess(executed, {})
    outputs = {cell.id: cell for cell in execution.code_cells(executed)}
    for cell in execution.code_cells(notebook):
        if cell.id not in outputs:
            raise ValueError(f"{source}: code cell {cell.id!r} is not in the English notebook")
        cell.outputs = outputs[cell.id].outputs
        cell.execution_count = outputs[cell.id].execution_count
    record = executed.metadata[execution.PACKAGE]["executed"]
    notebook.metadata[execution.PACKAGE] = {"executed": record}
    for cell in execution.code_cells(notebook):
        if name := tables.name_of(cell, source.stem):
            cell.metadata[execution.PACKAGE] = {"table": name}
    records.take_up(notebook, source.stem, root, BY_CODE[language].recorded)
    catalogue = localize.load(language, root, source.stem)
    if catalogue is None:
        return notebook, []
    localize.outputs(execution.code_cells(notebook), catalogue)
    return notebook, sorted(catalogue.missing)


def stage(language: str, root: Path) -> tuple[Path, str]:
    """Fill the folder of one language.

    Returns:
        The folder, and a hash of all that the rendered site depends on.
    """
    folder = root / "_build" / "stage" / language
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for page in (root / "book" / language).glob("*.md"):
        text = records.expand(page.read_text(encoding="utf-8"), root, language)
        (folder / page.name).write_text(text, encoding="utf-8")
    shutil.copy(root / "book" / "references.bib", folder)
    for place in (root / "images", root / "images" / language):  # the language's own come last
        for picture in place.glob("*.svg"):
            shutil.copy(picture, folder)
    for chapter in (root / "notebooks" / language).glob("*.ipynb"):
        notebook, missing = with_outputs(chapter, root, language)
        nbformat.write(notebook, folder / chapter.name)
        for text in missing:
            print(f"  {chapter.stem}: book/{language}/outputs does not have {text!r}")
    if (HERE / "_ext" / "locales" / language).exists():
        # Sphinx compiles labels/…/sphinx.po by itself when it lies beside the sources.
        shutil.copytree(HERE / "_ext" / "locales" / language, folder / "locales" / language)
    captions = BY_CODE[language].captions
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    for part in toc["parts"]:
        if "caption" in part:
            part["caption"] = captions.get(part["caption"], part["caption"])
    (folder / "_toc.yml").write_text(yaml.safe_dump(toc, allow_unicode=True), encoding="utf-8")

    inputs = [(p, folder) for p in folder.rglob("*")] + [(root / "_config.yml", root)]
    code = [*HERE.glob("*.py"), *HERE.glob("_ext/**/*.p[oy]"), *HERE.glob("_[st]*/**/*")]
    inputs += [(p, HERE) for p in code]
    if pyodide.used(root):
        inputs += [(p, HERE.parent) for p in lab_sources()]
        inputs += [(root / "book" / language / "lab.yml", root)]
        inputs += [(pyodide.folder(root) / "manifest.json", root)]
    files = [(str(p.relative_to(top)), digest(p.read_bytes())) for p, top in inputs if p.is_file()]
    tools = sorted(f"{d.name}=={d.version}" for d in importlib.metadata.distributions())
    return folder, digest(json.dumps([sorted(files), tools, sys.version]))


def lab_sources() -> list[Path]:
    """What labs run and draw with (``_ext/naranhi_lab.py``)."""
    package = HERE.parent / "src" / "naranhi"
    folders = [HERE / "_lab", *(package / name for name in ("schedules", "costs", "planning"))]
    files = [path for folder in folders for path in folder.rglob("*.*") if path.suffix != ".pyc"]
    return [package / "__init__.py", *files, *(package / "show").glob("*.py")]


def render(language: str, folder: Path, output: Path, root: Path) -> bool:
    """Render a staged folder to HTML; a warning makes it fail, after all of them are printed.

    Call it in a process of its own: Sphinx keeps state in its modules.
    """
    # Pages are read into many objects, and each collection scans those that are in use. By Python's
    # own thresholds that took a fifth of the time. Without collections, memory grows by 0.6 GiB.
    gc.freeze()
    gc.set_threshold(100_000)
    sys.path.insert(0, str(HERE / "_ext"))
    overrides = {"external_toc_path": "_toc.yml", "latex_individualpages": False}
    config, _ = get_final_config(
        user_yaml=root / "_config.yml",
        cli_config=overrides,
        sourcedir=folder,
        raise_on_invalid=True,
    )
    config["extensions"] = [name for name in config["extensions"] if name not in UNUSED]
    for name, value in BY_CODE[language].config.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    if address := config.get("html_baseurl"):
        config["html_baseurl"] = f"{address.rstrip('/')}/{language}/"
        config["ogp_site_url"] = config["html_baseurl"]
        config["sitemap_url_scheme"] = "{link}"  # the language is in the address already
        config["extensions"] += PUBLIC
    with patch_docutils(), docutils_namespace():
        app = Sphinx(
            srcdir=folder,
            confdir=None,
            outdir=output,
            doctreedir=output.with_name(f"{output.name}.doctrees"),
            buildername="html",
            confoverrides=config,
            status=None,
            freshenv=True,
            warningiserror=True,
            keep_going=True,
        )
        app.build(force_all=True)
    return app.statuscode == 0
