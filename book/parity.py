"""What must be the same in both languages, and how a saved notebook must look.

Each rule is a function from what it judges to a list of complaints, empty when all is well.
``complaints(root)`` asks them all.  That two texts say the same no program can tell: a person says
so by ``python book/build.py --declare-equal [PAGE ...]``, which records the hashes of both sides
in ``tests/notebooks/declared_equal.json``; from then on a change in either is a complaint until
it is declared equal again.
"""

import json
import re
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import yaml
from execution import code_cells, digest
from languages import BY_CODE, EXECUTED, LANGUAGES
from markdown_it import MarkdownIt
from nbformat import reader
from nbformat.validator import iter_validate

PAIR = LANGUAGES[:2]  # a third language is rendered, and not compared
FIRST, SECOND = (language.english for language in PAIR)
DECLARED = Path("tests/notebooks/declared_equal.json")
LINES = 25

# What a reference points to; {term} is left out, since a term's name is a word of the language.
ROLE = re.compile(r"\{(ref|numref|eq|doc|cite(?::\w+)?)\}`(?:[^`<]*<([^`>]+)>|([^`]+))`")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
PREDICTION = re.compile(r"^% (name|range|scale|choices): *(.*)$", re.MULTILINE)
LABEL = re.compile(r"^\(([^)\s]+)\)=\s*$|^\s*:(?:name|label): *(\S+)", re.MULTILINE)


def read_pages(root: Path, language: str) -> dict[str, object]:
    """Each page's name, and its text or its notebook."""
    texts = {p.stem: p.read_text(encoding="utf-8") for p in (root / "book" / language).glob("*.md")}
    notebooks = (root / "notebooks" / language).glob("*.ipynb")
    return texts | {p.stem: reader.reads(p.read_text(encoding="utf-8")) for p in notebooks}


def prose(page) -> dict[str, str]:
    """The texts of a page that are written once in each language, by the id of their cell."""
    if isinstance(page, str):
        return {"page": page}
    captions = {cell.id: caption(cell) for cell in code_cells(page)}
    texts = {cell.id: cell.source for cell in page.cells if cell.cell_type == "markdown"}
    return {**{name: text for name, text in captions.items() if text}, **texts}


def figure(cell) -> dict:
    return cell.metadata.get("mystnb", {}).get("figure", {})


def caption(cell) -> str:
    return figure(cell).get("caption", "")


def same_pages(english: dict, korean: dict) -> list[str]:
    missing = [(SECOND, name) for name in english.keys() - korean.keys()]
    missing += [(FIRST, name) for name in korean.keys() - english.keys()]
    return [f"{name}: there is no {language} page" for language, name in sorted(missing)]


def same_cells(name: str, english, korean) -> list[str]:
    """Same cells in the same order, and code cells equal to the byte."""
    order = [[(cell.cell_type, cell.id) for cell in page.cells] for page in (english, korean)]
    if order[0] != order[1]:
        pairs = zip_longest(*order, fillvalue=("", "nothing"))
        left, right = next((ours[1], theirs[1]) for ours, theirs in pairs if ours != theirs)
        return [f"{name}: cells differ in id, kind or order: {FIRST} {left!r}, {SECOND} {right!r}"]
    wrong = []
    for ours, theirs in zip(code_cells(english), code_cells(korean), strict=True):
        parts = {
            "code": [ours.source, theirs.source],
            "tags": [cell.metadata.get("tags", []) for cell in (ours, theirs)],
            "figure's name": [figure(cell).get("name") for cell in (ours, theirs)],
            "caption (one has none)": [bool(caption(cell)) for cell in (ours, theirs)],
        }
        differing = [what for what, (left, right) in parts.items() if left != right]
        wrong += [f"{name}, cell {ours.id!r}: the {what} differs" for what in differing]
    return wrong


def headings(text: str) -> list[str]:
    return [token.tag for token in MarkdownIt().parse(text) if token.type == "heading_open"]


def references(text: str) -> Counter:
    """Labels, the targets of references, citations and links within the book, and predictions."""
    found = [(role, target or name) for role, target, name in ROLE.findall(text)]
    found += [("link", target) for target in LINK.findall(text)]
    found += [("label", one or other) for one, other in LABEL.findall(text)]
    for key, value in PREDICTION.findall(text):
        found.append((key, f"of {value.count('|') + 1}" if key == "choices" else value))
    return Counter(found)


def same_structure(name: str, english, korean) -> list[str]:
    """Headings' levels and references agree, cell by cell."""
    wrong = []
    ours, theirs = prose(english), prose(korean)
    for cell in [cell for cell in ours if cell in theirs]:
        if headings(ours[cell]) != headings(theirs[cell]):
            wrong.append(f"{name}, {cell!r}: the levels of headings differ")
        left, right = references(ours[cell]), references(theirs[cell])
        for found, language in (left - right, SECOND), (right - left, FIRST):
            listed = ", ".join(f"{role} {target}" for role, target in found)
            if listed:
                wrong.append(f"{name}, {cell!r}: the {language} side lacks {listed}")
    return wrong


def unusable(root: Path) -> list[str]:
    """What keeps notebooks from being executed and shown.

    No JSON, no ids, the same id twice; a code cell that the first language does not have.
    """
    wrong, notebooks = [], {}
    for path in sorted((root / "notebooks").glob("*/*.ipynb")):
        name = str(path.relative_to(root))
        try:
            notebook = reader.reads(path.read_text(encoding="utf-8"))
        except (reader.NotJSONError, UnicodeDecodeError, AttributeError, KeyError) as error:
            wrong.append(f"{name} is not a notebook: {str(error).partition(chr(10))[0][:100]}")
        else:
            wrong += without_ids(name, notebook)
            if path.parent.name in BY_CODE:
                notebooks[path] = notebook
    return wrong or [
        complaint for path in notebooks for complaint in without_outputs(path, notebooks)
    ]


def without_parts(root: Path) -> list[str]:
    """What keeps ``_toc.yml`` from naming the pages: they are its root, and its parts' chapters."""
    try:
        toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
        pages = [toc["root"], *(page["file"] for part in toc["parts"] for page in part["chapters"])]
    except (OSError, ValueError, yaml.YAMLError) as error:
        return [f"_toc.yml cannot be read: {error}"]
    except (KeyError, TypeError):
        pages = [None]
    if all(isinstance(page, str) for page in pages):
        return []
    return ["_toc.yml: write a root, and parts with chapters, each with a file"]


def without_outputs(path: Path, notebooks: dict[Path, object]) -> list[str]:
    """Only notebooks of the first language are executed; in the others a cell has its twin's."""
    name, first = f"notebooks/{path.parent.name}/{path.name}", f"notebooks/{EXECUTED}"
    executed = notebooks.get(path.parent.with_name(EXECUTED) / path.name)
    if executed is None:
        return [f"{name}: there is no {first}/{path.name}, whose outputs it would show"]
    known = {cell.id for cell in code_cells(executed)}
    return [
        f"{name}: {first} has no code cell {cell.id!r}, whose outputs this one would show"
        for cell in code_cells(notebooks[path])
        if cell.id not in known
    ]


def without_ids(name: str, notebook) -> list[str]:
    """Cells are told apart by their ids, which formats before 4.5 do not have."""
    form = notebook.get("nbformat", 1), notebook.get("nbformat_minor", 0)
    if form < (4, 5):
        return [f"{name}: format {form[0]}.{form[1]} has no cell ids"]
    if not all("id" in cell for cell in notebook.cells):
        return [f"{name}: a cell has no id"]
    uses = Counter(cell.id for cell in notebook.cells)
    return [f"{name}: {count} cells have the id {i!r}" for i, count in uses.items() if count > 1]


def saved_form(name: str, notebook) -> list[str]:
    """Valid, of the format that has ids, without outputs, without ``!``, and in short cells."""
    # nbformat.validate would repair what it finds, and so hide it.
    for error in iter_validate(notebook):
        return [f"{name}: not a valid notebook: {error.message.splitlines()[0]}"]
    wrong = without_ids(name, notebook)
    if not all("id" in cell for cell in notebook.cells):
        return wrong
    for cell in code_cells(notebook):
        lines = cell.source.splitlines()
        if cell.outputs or cell.execution_count is not None:
            wrong.append(f"{name}, cell {cell.id!r}: saved with outputs")
        if any(line.lstrip().startswith("!") for line in lines):
            wrong.append(f"{name}, cell {cell.id!r}: a ! command, whose failure passes silently")
        if len(lines) > LINES:
            wrong.append(f"{name}, cell {cell.id!r}: {len(lines)} lines, more than {LINES}")
    return wrong


def hashes(english, korean) -> dict[str, str]:
    """For each text of a page, the hash of its English and of its Korean."""
    ours, theirs = prose(english), prose(korean)
    both = {**ours, **theirs}
    return {cell: f"{digest(ours.get(cell, ''))} {digest(theirs.get(cell, ''))}" for cell in both}


def undeclared(declared: dict, now: dict) -> list[str]:
    """Texts that are not as they were when they were last declared equal.

    Args:
        declared, now: page -> cell -> the two hashes, English first.
    """
    wrong = []
    for page in sorted({*declared, *now}):
        before, after = declared.get(page, {}), now.get(page, {})
        for cell in {**after, **before}:
            sides = (side.get(cell, " ").split(" ") for side in (before, after))
            compared = zip((FIRST, SECOND), *sides, strict=True)
            changed = [language for language, old, new in compared if old != new]
            if cell not in before:
                wrong.append(f"{page}, {cell!r}: never declared equal")
            elif cell not in after:
                wrong.append(f"{page}, {cell!r}: declared equal, and gone since")
            elif changed:
                wrong.append(
                    f"{page}, {cell!r}: {' and '.join(changed)} changed since declared equal"
                )
    return wrong


def complaints(root: Path) -> list[str]:
    """All that is wrong with the two languages of a book."""
    english, korean = (read_pages(root, language.code) for language in PAIR)
    wrong = same_pages(english, korean)
    now = {}
    for name in sorted(english.keys() & korean.keys()):
        pair = english[name], korean[name]
        now[name] = hashes(*pair)
        if not isinstance(pair[0], str):
            wrong += [
                complaint
                for language, page in zip(PAIR, pair, strict=True)
                for complaint in saved_form(f"{language.code}/{name}", page)
            ]
            wrong += same_cells(name, *pair)
        wrong += same_structure(name, *pair)
    path = root / DECLARED
    declared = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return wrong + undeclared(declared, now)


def declare_equal(root: Path, names: list[str]) -> None:
    """Record that the two sides of the named pages, or of all, say the same now."""
    english, korean = (read_pages(root, language.code) for language in PAIR)
    both = english.keys() & korean.keys()
    unknown = sorted(set(names) - both)
    if unknown:
        raise SystemExit(f"no page in both languages named {', '.join(unknown)}")
    path = root / DECLARED
    declared = json.loads(path.read_text(encoding="utf-8")) if names and path.exists() else {}
    declared |= {name: hashes(english[name], korean[name]) for name in names or both}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(declared, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"Declared equal: {', '.join(sorted(names or both))}")
