"""Show source from src/, highlighted, under the name of its file; and what changes between two."""

from __future__ import annotations

import ast
import difflib
import html
import inspect
import itertools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.display import display
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]  # src: the package and the recipes

# The book's site has its own colours for pygments' classes. Elsewhere (JupyterLab, Colab) these
# rules apply; :where() has no specificity, so any rule of the page overrides them.
STYLE = """\
:where(.naranhi-source) :where(pre){margin:0;padding:.6em .8em;line-height:1.4;\
background:transparent}
:where(.naranhi-source) :where(.k,.kn,.kc,.ow)\
{color:var(--jp-mirror-editor-keyword-color,#b5651d)}
:where(.naranhi-source) :where(.nf,.nc,.nd,.fm){color:var(--jp-mirror-editor-def-color,#2f6fdb)}
:where(.naranhi-source) :where(.nb,.bp){color:var(--jp-mirror-editor-builtin-color,#12807a)}
:where(.naranhi-source) :where(.s1,.s2,.sd,.sa,.si,.se)\
{color:var(--jp-mirror-editor-string-color,#c2524e)}
:where(.naranhi-source) :where(.mi,.mf){color:var(--jp-mirror-editor-number-color,#12807a)}
:where(.naranhi-source) :where(.c1){color:var(--jp-mirror-editor-comment-color,#6f7b85);\
font-style:italic}
:where(.naranhi-source) :where(.gi){color:#2e8166}
:where(.naranhi-source) :where(.gd){color:#c2524e}
"""


def source(*objects: Callable[..., Any] | ModuleType, docstrings: bool = True) -> None:
    """Show the source of functions, classes or modules of src/, under their file and names.

    Consecutive objects from one file are shown together. Line numbers are not shown, because they
    would change with every edit above.

    Args:
        objects: the functions, classes or modules, in the order to show.
        docstrings: False leaves the docstrings out.

    Raises:
        ValueError: there are no objects, or an object does not come from src/: the book shows only
            its own code.
    """
    if not objects:
        raise ValueError("name at least one function, class or module to show")
    parts = []
    for file, neighbours in itertools.groupby(objects, key=_file):
        neighbours = list(neighbours)
        names = [item.__qualname__ for item in neighbours if not inspect.ismodule(item)]
        parts.append(
            (
                " · ".join([file, ", ".join(names)] if names else [file]),
                "\n\n".join(_text(item, docstrings) for item in neighbours),
            )
        )
    _display(parts, PythonLexer())


def changes(
    before: Callable[..., Any], after: Callable[..., Any] | tuple[Path, str], context: int = 1
) -> None:
    """Show what changes from one function of src/ to another: lines that go (-) and come (+).

    Args:
        before: the function to start from.
        after: the function that it becomes; or its file and its name, for a module whose import
            would do more than define it.
        context: the number of lines that stay, shown around each change; what is left out between
            two changes is shown as three dots.

    Raises:
        ValueError: an object does not come from src/, or is not in its file, or nothing changes.
    """
    texts = [_text(item, docstrings=False).splitlines() for item in (before, after)]
    lines = list(difflib.unified_diff(*texts, n=context, lineterm=""))[2:]
    if not lines:
        raise ValueError(f"{before.__qualname__} is the same as {after}")
    shown = ["   ..." if line.startswith("@@") else line for line in lines]
    heading = " → ".join(f"{_file(item)}, {_name(item)}" for item in (before, after))
    _display([(heading, "\n".join(shown[1:]) + "\n")], DiffLexer())


def _name(item):
    return item[1] if isinstance(item, tuple) else item.__qualname__


def _display(parts, lexer):
    """Display [(heading, text), ...], highlighted."""
    # JupyterLab would wrap long lines, and lose the indentation, which carries meaning.
    formatter = HtmlFormatter(prestyles="white-space:pre;overflow-x:auto")
    blocks = "".join(
        f'<div class="naranhi-file" style="margin:.6em 0 .2em;font-size:.9em"><code>'
        f"{html.escape(heading)}</code></div>{highlight(text, lexer, formatter)}"
        for heading, text in parts
    )
    display(
        {
            "text/html": f'<style>\n{STYLE}</style><div class="naranhi-source">{blocks}</div>',
            "text/plain": "\n\n".join(f"# {heading}\n{text}" for heading, text in parts),
        },
        raw=True,
    )


def _file(item):
    try:
        path = item[0] if isinstance(item, tuple) else inspect.getsourcefile(inspect.unwrap(item))
        path = Path(path).resolve()
    except TypeError:
        raise ValueError(f"{item!r} has no source to show") from None
    if not path.is_relative_to(ROOT):
        name = getattr(item, "__qualname__", repr(item))
        raise ValueError(f"{name} does not come from src/")
    return "src/" + path.relative_to(ROOT).as_posix()


def _text(item, docstrings):
    if isinstance(item, tuple):
        text = item[0].read_text()
        nodes = [node for node in ast.parse(text).body if getattr(node, "name", None) == item[1]]
        if not nodes:
            raise ValueError(f"{item[0]} defines no {item[1]}")
        text = ast.get_source_segment(text, nodes[0]) + "\n"
    else:
        text = textwrap.dedent(inspect.getsource(inspect.unwrap(item))).rstrip() + "\n"
    return text if docstrings else _without_docstrings(text)


def _without_docstrings(text):
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
            and len(node.body) > 1
        ):
            first, after = node.body[0], node.body[1]
            start = min([after.lineno, *(d.lineno for d in getattr(after, "decorator_list", ()))])
            for i in range(first.lineno - 1, start - 1):
                # Keep the comments between the docstring and the code.
                if i < first.end_lineno or not lines[i].strip():
                    lines[i] = None
    return "\n".join(line for line in lines if line is not None).strip() + "\n"
