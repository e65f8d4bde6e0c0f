"""What machines with GPUs recorded, shown in the pages (``gpu.py`` writes it).

A record lies in ``book/recorded/MACHINE/CHAPTER.json``: what a chapter showed when it was executed
on that machine, by code cell. A chapter shows it beside this machine's outputs, cell by cell, where
it differs from them. A record goes stale visibly: a cell that has changed since is left out, and
the page's stamp says how many did, and whether the package has changed.
"""

import json
import re
from html import escape
from pathlib import Path
from typing import NamedTuple

import execution
import localize
import nbformat
from alone import CannotBuild
from execution import digest

FOLDER = Path("book/recorded")
# Of a package: where it lies on that machine, and the line of source below it.
WARNING = re.compile(r"^(\[.*\] )?/\S*:\d+: \w*Warning: .*\n(?:(\[.*\] )?  .*\n)?", re.M)


class Record(NamedTuple):
    """A chapter's record.

    Args:
        machine: the stamp of the machine: "device", "torch", "driver", ...
        executed: when, from which commit, and in how many seconds.
        modules: the digest of the package's modules that it imports.
        cells: for each code cell, by id, the digest of its source and its outputs.
    """

    machine: dict
    executed: dict
    modules: str
    cells: dict[str, dict]


def reduce(executed) -> dict:
    """Return an executed notebook as a record: its texts, and as HTML only what was measured.

    A picture that is computed is the same on every machine, and so is not recorded.
    """
    facts = executed.metadata[execution.PACKAGE]
    cells = {}
    for cell in execution.code_cells(executed):
        outputs = [reduced for output in cell.outputs if (reduced := _reduce(output))]
        if outputs:
            cells[cell.id] = {"source": digest(cell.source), "outputs": outputs}
    return {"executed": facts["executed"], "modules": _modules(facts["key"]), "cells": cells}


def _modules(key):
    return digest(json.dumps(key["modules"], sort_keys=True))


def _reduce(output):
    if output.output_type == "stream":
        text = WARNING.sub("", output.text)
        return {"text": text} if text else None
    if output.output_type == "error":
        return {"text": f"{output.ename}: {output.evalue}\n"}
    text = {"text": output.data.get("text/plain", "")}
    if "text/html" not in output.data:
        return text
    if output.metadata.get("naranhi", {}).get("measured"):
        return {**text, "html": output.data["text/html"]}
    return None


def write(folder: Path, name: str, content: dict) -> None:
    """Write a file of a machine's folder."""
    execution.write(folder / name, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def load(name: str, root: Path) -> list[Record]:
    """Return a chapter's records, by machine."""
    records = []
    for stamp in sorted((root / FOLDER).glob("*/stamp.json")):
        path = stamp.with_name(f"{name}.json")
        if path.exists():
            records.append(Record(_read(stamp, "device"), **_read(path, *Record._fields[1:])))
    return records


def _read(path, *fields):
    """Return a file of JSON.

    Raises:
        CannotBuild: it is damaged, or lacks one of the fields.
    """
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if missing := [field for field in fields if field not in kept]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        return kept
    except ValueError as error:
        raise CannotBuild(
            f"{path} is damaged ({error}): git checkout brings it back, or delete its folder, and "
            "make gpu records anew on such a machine"
        ) from None


def changed_cells(record: Record, notebook) -> list[str]:
    """Return the cells, by id, that have changed since a record was made, or are gone."""
    now = {cell.id: digest(cell.source) for cell in execution.code_cells(notebook)}
    return [id for id, cell in record.cells.items() if now.get(id) != cell["source"]]


def take_up(notebook, name: str, root: Path, title: str) -> None:
    """Put what other machines recorded below what the cells of a chapter show here.

    Args:
        notebook: the chapter, in one language, with this machine's outputs.
        name: the chapter's name.
        root: the project.
        title: the title of such a part of the page; a format of a machine's stamp.
    """
    summary, modules = [], _modules(execution.key(notebook, root))
    for record in load(name, root):
        stale = changed_cells(record, notebook)
        since = {"cells": len(stale), "package": record.modules != modules}
        # What executed it says "cuda" where the machine names its GPUs.
        device = {"device": record.machine["device"]}
        facts = {**record.machine, **record.executed, **device, "changed": since}
        summary.append(facts)
        # A copy without git knows no commit.
        heading = title if facts.get("commit") else title.replace(", {commit}", "")
        for cell in execution.code_cells(notebook):
            kept = record.cells.get(cell.id)
            if kept is None or cell.id in stale or "hide-cell" in cell.metadata.get("tags", []):
                continue
            different = _different(kept["outputs"], cell.outputs)
            if different:
                _append(cell, _details(heading.format(**facts), different))
    notebook.metadata[execution.PACKAGE]["recorded"] = summary


def expand(text: str, root: Path, language: str) -> str:
    """Put what was recorded into a page that does not run.

    A line `%recorded MACHINE CHAPTER CELL` becomes what the cell showed there, in the page's
    language, and `%steps MACHINE` a list of what ran there and how it ended.

    Raises:
        ValueError: A line names what is not recorded, or what the catalogue does not have.
    """
    return re.sub(
        r"^%(recorded|steps) (.*)$",
        lambda match: _expanded(match, root, language),
        text,
        flags=re.M,
    )


def _expanded(match, root, language):
    kind, (machine, *where) = match[1], match[2].split()
    folder = root / FOLDER / machine
    try:
        if kind == "steps":
            stamp = _read(folder / "stamp.json")
            ended = {step["step"]: _ending(step) for step in stamp["steps"]}
            for path in _chapters(folder):  # which may be of an earlier run
                seconds = _read(path)["executed"]["seconds"]
                ended.setdefault(path.stem, f"passed, {seconds} s")
            width = 2 + max(map(len, ended))
            order = sorted(ended, key=lambda name: (name[0].isdigit(), name))  # chapters last
            lines = [f"{name:{width}}{ended[name]}" for name in order]
            return _fenced("\n".join(lines))
        chapter, cell = where
        content = _read(folder / f"{chapter}.json")
        texts = [_plain(output["text"]) for output in content["cells"][cell]["outputs"]]
    except (FileNotFoundError, KeyError, ValueError) as error:
        raise ValueError(f"{match[0]}: nothing like that is recorded ({error})") from error
    catalogue = localize.load(language, root, chapter)
    shown = "\n\n".join(_on_a_page(text, catalogue) for text in texts)
    if catalogue and catalogue.missing:
        missing = ", ".join(map(repr, sorted(catalogue.missing)))
        raise ValueError(f"{match[0]}: book/{language}/outputs does not have {missing}")
    return shown


def _ending(step):
    return step["result"] + (f", {step['seconds']} s" if step["seconds"] else "")


def _on_a_page(text, catalogue):
    table = _table(text)
    if catalogue is None:
        return table or _fenced(text)
    return localize.page(table, catalogue) if table else _fenced(localize.claims(text, catalogue))


def _fenced(text):
    return f"```text\n{text}\n```"


def _table(text):
    """Return a table that `show.table` wrote as text as HTML; None, if the text is not one."""
    lines = text.rstrip().split("\n")
    rule = next((n for n, line in enumerate(lines) if re.fullmatch("-+(?:  -+)*", line)), 0)
    if rule not in (1, 2):
        return None
    spans = [column.span() for column in re.finditer("-+", lines[rule])]
    rows = [[line[a:b] for a, b in spans] for line in (lines[rule - 1], *lines[rule + 1 :])]
    # Of a column that is aligned to the right, each cell reaches the end.
    right = [all(len(row[n].rstrip()) == b - a for row in rows) for n, (a, b) in enumerate(spans)]

    def line(tag, row):
        cells = zip(row, right, strict=True)
        return "".join(
            f'<{tag} style="text-align:{"right" if end else "left"}'
            f'{";white-space:nowrap" if end else ""}">'
            f"{escape(cell.strip())}</{tag}>"
            for cell, end in cells
        )

    head = f"<caption>{escape(lines[0])}</caption>" if rule == 2 else ""
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows[1:])
    return (
        f'<div class="naranhi-record-table"><table>{head}<thead><tr>{line("th", rows[0])}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def _chapters(folder):
    return sorted(folder.glob("[0-9]*.json"))


def _different(recorded, outputs):
    """Return the recorded outputs that the cell does not show on this machine too."""
    recorded = _joined(recorded)
    own = _joined([reduced for output in outputs if (reduced := _reduce(output))])
    texts = {output.get("text", "").strip() for output in own}
    texts |= {output.data.get("text/plain", "").strip() for output in outputs if "data" in output}
    return [
        output
        for output in recorded
        if ("html" in output and output not in own)
        or ("html" not in output and output["text"].strip() not in texts)
    ]


def _joined(outputs):
    """Return outputs with printed lines that follow each other in one: a kernel may split them."""
    joined = []
    for output in outputs:
        if joined and {*joined[-1], *output} == {"text"} and joined[-1]["text"].endswith("\n"):
            joined[-1] = {"text": joined[-1]["text"] + output["text"]}
        else:
            joined.append(output)
    return joined


def _details(title, outputs):
    parts = [output["html"] if "html" in output else _shown(output["text"]) for output in outputs]
    summary = f"<summary>{escape(title)}</summary>"
    return f'<details class="naranhi-record">{summary}{"".join(parts)}</details>'


def _shown(text):
    plain = _plain(text)
    return _table(plain) or f"<pre>{escape(plain)}</pre>"


def _append(cell, html):
    """Put HTML below what a cell shows; a figure stays one output, so that it keeps its number."""
    for output in reversed(cell.outputs):
        if "text/html" in output.get("data", {}):
            output.data["text/html"] += html
            return
    cell.outputs.append(nbformat.v4.new_output("display_data", {"text/html": html}))


def _plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip()
