"""What "When something goes wrong" quotes is said: every message of ours is in the source.

On that page, a message is what stands as code in the heading of an entry (``###``), or in the first
column of a table. It is one of ours, and then the words of a string literal, or it is in `THEIRS`.
In a message, ``…`` stands for anything, and a number may stand for what a program fills in.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = {language: ROOT / "book" / language / "troubleshooting.md" for language in ("en", "ko")}
CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)")
ROLE = re.compile(r"\{[\w:]+\}`[^`]+`")
HOLE = "\0"  # what a program fills in
# Where our messages come from: besides the package, what builds, runs and tests the book.
PYTHON = "src/naranhi/**/*.py", "book/*.py", "tests/conftest.py", "tests/recipes/test_recipes.py"
# The messages of other programs.
THEIRS = {
    # Python, pip, the shell, and Jupyter
    "The virtual environment was not created successfully because ensurepip is not available. …",
    "make: command not found",
    "No matching distribution found for …",
    "No space left on device",
    "No module named 'resource'",
    "No such file or directory: '/proc/sys/kernel/random/boot_id'",
    "No module named 'naranhi'",
    "AssertionError",
    "Cell magic `%%ranks` not found.",
    "The kernel for … appears to have died. It will restart automatically.",
    # torch, NCCL, and the driver
    "Torch not compiled with CUDA enabled",
    "address already in use",
    "EADDRINUSE",
    "The NVIDIA driver on your system is too old (found version …). …",
    "Duplicate GPU detected",
    "CUDA out of memory. Tried to allocate …",
    "Watchdog caught collective operation timeout: …",
    "size mismatch, got input (…), mat (…), vec (0)",
    "Target … is out of bounds.",
    "The IPv6 network addresses of … cannot be retrieved (gai error: …)",
    # transformers
    "We couldn't connect to 'https://huggingface.co' to load the files, …",
    # Playwright and pytest
    "Executable doesn't exist at …",
    "Looks like Playwright was just installed or updated.",
    "Timeout (>300.0s) from pytest-timeout.",
    # DeepSpeed, as its chapter says
    "No module named 'mpi4py'",
    "Unable to find hostfile, …",
    "… was not reachable via ssh",
    "unrecognized arguments: --local_rank=0",
    "CUDA_HOME does not exist, unable to compile CUDA op(s)",
    "Unable to JIT load the … op due to ninja not being installed.",
    "no kernel image is available …",
}


def codes(text: str) -> list[str]:
    """The inline code in a text, as a reader sees it."""
    return [code.strip() for _, code in CODE.findall(ROLE.sub("", text))]


def entries(page: str) -> list[str]:
    """The entries of a page, each with its heading."""
    return re.split(r"^(?=### )", page, flags=re.MULTILINE)[1:]


def messages(page: str) -> list[str]:
    """The messages that a page quotes, in order."""
    found = []
    for line in page.splitlines():
        if line.startswith("### "):
            found += codes(line)
        elif line.startswith("|"):
            found += codes(re.split(r"(?<!\\)\|", line)[1])
    return found


def literals(source: str) -> list[str]:
    """The strings of a Python file, docstrings aside, with a hole for each value in an f-string."""
    tree = ast.parse(source)
    inside, found = set(), []
    for node in ast.walk(tree):
        match node:
            case ast.Expr(ast.Constant(str()) as docstring):
                inside.add(id(docstring))
            case ast.JoinedStr(parts):
                inside.update(map(id, parts))
                found.append("".join(getattr(part, "value", HOLE) for part in map(_part, parts)))
    return found + [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside
    ]


def _part(node):
    return node if isinstance(node, ast.Constant) else None


def makefile(source: str) -> list[str]:
    """The recipes of a Makefile, with a hole for each variable and each value to be formatted."""
    recipes = re.sub(r"^#.*$", "", source, flags=re.MULTILINE)
    return [re.sub(r"\$\(\w+\)|%[ds]", HOLE, recipes)]


@cache
def ours() -> list[str]:
    """Every string that a program of the book can say."""
    files = [file for pattern in PYTHON for file in sorted(ROOT.glob(pattern))]
    found = [text for file in files for text in literals(file.read_text())]
    return found + makefile((ROOT / "Makefile").read_text())


def is_said(message: str, strings: list[str]) -> bool:
    """Whether a message is part of one of the strings."""
    pattern = ""
    for part in re.split(r"(…|\d+(?:\.\d+)*)", message.strip("… ")):
        if part == "…":
            pattern += r"[\s\S]*?"
        elif part[:1].isdecimal():
            parts = re.sub(r"\d+", HOLE, part)  # 3.10 may be one value or two
            pattern += f"(?:{HOLE}|{re.escape(parts)}|(?<![0-9]){re.escape(part)}(?![0-9]))"
        else:
            pattern += re.escape(part)
    return any(re.search(pattern, text) for text in strings)


def unsaid(page: str, strings: list[str]) -> list[str]:
    """The messages of a page that are neither another program's nor among these strings."""
    return [m for m in messages(page) if m not in THEIRS and not is_said(m, strings)]


@pytest.mark.parametrize("language", PAGES)
def test_every_message_of_ours_is_in_the_source(language):
    assert unsaid(PAGES[language].read_text(), ours()) == []


@pytest.mark.parametrize("language", PAGES)
def test_the_page_quotes_all_of_theirs_and_says_enough_of_ours(language):
    quoted = messages(PAGES[language].read_text())
    assert set(quoted) >= THEIRS
    own = [message for message in quoted if message not in THEIRS]
    assert len(own) > 40
    # Wildcards apart, enough is left that it cannot be said by chance.
    assert [m for m in own if len(re.findall("[A-Za-z]", m)) < 9] == []


def test_both_languages_quote_the_same():
    english, korean = (PAGES[language].read_text() for language in ("en", "ko"))
    assert messages(english) == messages(korean)
    for one, other in zip(entries(english), entries(korean), strict=True):
        assert sorted(codes(one)) == sorted(codes(other))
        assert fences(one) == fences(other)


def fences(text: str) -> list[str]:
    return re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)


def test_every_entry_has_an_address_of_its_own():
    lines = PAGES["en"].read_text().splitlines()
    places = [line for i, line in enumerate(lines) if lines[i + 1 :][:1] and is_heading(lines, i)]
    assert all(re.fullmatch(r"\(trouble-[a-z-]+\)=", place) for place in places)
    assert len(set(places)) == len(places) > 30


def is_heading(lines: list[str], i: int) -> bool:
    return lines[i + 1].startswith(("## ", "### "))


@pytest.mark.parametrize(
    ("message", "source"),
    [
        ("there are no ranks yet; …", 'RankError("there are no ranks yet; start them")'),
        ("2 of 4 ranks were up", 'f"{len(ids)} of {size} ranks were up after {s:.0f} s."'),
        ("goes with --tp 2, 4 or 8, not 1", 'f"goes with --tp 2, 4 or {M}, not {tp}"'),
        ("one, and … is 3.10; …", 'f"one, and {name} is {a}.{b}; another"'),
        ("so … long", '"so "\n    f"very {much}"\n    " long"'),
    ],
)
def test_a_message_is_found_and_one_that_has_changed_is_not(message, source):
    strings = literals(f"print(\n    {source}\n)")
    assert is_said(message, strings)
    assert not is_said(message.replace("o", "0", 1), strings)
    assert not is_said(message, literals(f"'''{source}'''"))  # a docstring says nothing


def test_a_number_stands_for_a_value_only():
    assert is_said("up to 2", ["up to \0"]) and is_said("up to 2", ["up to 2"])
    assert not is_said("up to 2", ["up to 3"]) and not is_said("up to 2", ["up to 20"])


@pytest.mark.parametrize("language", PAGES)
def test_a_changed_page_is_noticed(language):
    """With a letter more in its longest word, any message of ours is said by nobody."""
    for message in messages(PAGES[language].read_text()):
        if message not in THEIRS:
            word = max(re.findall("[A-Za-z]+", message), key=len)
            changed = message.replace(word, f"{word}x", 1)
            assert unsaid(f"### `` {changed} ``", ours()) == [changed]


def test_a_changed_program_is_noticed():
    page = PAGES["en"].read_text()
    for file in ("src/naranhi/world/notebook.py", "book/gpu.py", "Makefile"):
        source = (ROOT / file).read_text()
        said = makefile(source) if file == "Makefile" else literals(source)
        others = [text for text in ours() if text not in said]
        assert unsaid(page, others), file
