"""``book/build.py`` on a book of one page and two chapters: what it executes, and what it keeps.

The chapters import ``naranhi``'s namesakes in the little book's own ``src/``: that a change in one
of them executes again what imports it, and nothing else, can then be tried without harm.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

REPOSITORY = Path(__file__).resolve().parents[2]
BOOK = REPOSITORY / "book"
sys.path.insert(0, str(BOOK))

import execution  # noqa: E402

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
FIGURE = 'from IPython.display import HTML\nHTML(\'<svg width="9" height="9"></svg>\')'
TABLE = """from IPython.display import HTML
HTML('<table class="naranhi-table">{}<tr><td>9</td></tr></table>')
"""
CAPTIONS = {"01_ring": "<caption>Squares</caption>", "02_cost": ""}
SOURCES = {
    "__init__.py": "class World:\n    backend = 'nccl'\n",
    "collectives.py": "from naranhi import ring\n\ndef total(n):\n    return ring.total(n)\n",
    "ring.py": "def total(n):\n    return sum(range(n))\n",
    "costs.py": "def seconds(n):\n    return 2 * n\n",
}
CHAPTERS = {
    "01_ring": "from naranhi import collectives\nprint('total', collectives.total(4))",
    "02_cost": "import naranhi\nfrom naranhi import costs\nworld = naranhi.World()\n"
    "print('seconds', costs.seconds(21))",
}
WORDS = {
    "en": ("Chapter", "See {numref}`fig-01_ring` and {numref}`table-02-rows`.", "A square."),
    "ko": ("장", "{numref}`fig-01_ring`과 {numref}`table-02-rows`을 보십시오.", "네모."),
}

PICTURES = {"": "side by side", "ko": "나란히"}


FOLDED = ("import re", "x = 1", "class check:\n    true = print\n\n\ncheck.true(1)")
EXERCISES = "## Exercises\n\n**1. Paper.** Why?\n"
ADMONITION = """:::{admonition} Key point
:class: important
So.
:::
"""
WORDS_OF_ANSWER = """<details>
<summary>In words</summary>

So.

</details>

**2. Paper.** Why?

<details>
<summary>In words</summary>

So.

</details>
"""


def write_chapter(root: Path, name: str, source: str) -> None:
    for language, (title, text, caption) in WORDS.items():
        figure = {"mystnb": {"figure": {"name": f"fig-{name}", "caption": caption}}}
        folded = {"tags": ["hide-input"]}
        cells = [
            new_markdown_cell(f"# {title} {name}\n\n[Book](welcome.md): {text}", id="title"),
            new_code_cell(source, id="run"),
            new_code_cell(FIGURE, id="figure", metadata={**figure, **folded}),
            new_code_cell(TABLE.format(CAPTIONS[name]), id="rows"),
            new_code_cell("print('answer', 6 * 7)", id="answer", metadata={"tags": ["hide-cell"]}),
            new_markdown_cell(ADMONITION, id="key"),  # whose title is no section's
            *(
                new_code_cell(code, id=f"fold-{i}", metadata=folded)
                for i, code in enumerate(FOLDED)
            ),
            new_markdown_cell(EXERCISES, id="exercises"),
            *(
                new_code_cell("1", id=f"given-{i}", metadata={"tags": ["hide-cell", *tags]})
                for i, tags in enumerate((["set-up"], [], []))
            ),
            new_markdown_cell(WORDS_OF_ANSWER, id="words"),
        ]
        path = root / "notebooks" / language / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(new_notebook(cells=cells, metadata=KERNEL), path)


def build(root: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, BOOK / "build.py", "--root", root, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def executed(result: subprocess.CompletedProcess) -> list[str]:
    return [
        line.split(":")[0].strip() for line in result.stdout.splitlines() if "executing (" in line
    ]


def kept(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "_build/executed").iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The little book, built once; a test changes a copy of it."""
    root = tmp_path_factory.mktemp("book")
    for name, text in SOURCES.items():
        path = root / "src/naranhi" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, source in CHAPTERS.items():
        write_chapter(root, name, source)
    for language in WORDS:
        page = root / "book" / language / "welcome.md"
        page.parent.mkdir(parents=True)
        page.write_text(
            "# Book\n\n:::{only} repository\nAt {{ repository_url }}.\n:::\n\n"
            "```{raw} html\n:file: cover.svg\n```\n\n"
            "값 $x$는 **1**($y$), and $z$, but $a$ and\n$b$-th($c$)... $d$: "
            r"$w(t+1) = w(t) - \text{rate}\cdot\nabla\text{loss}_t(w(t-1))$이고,"
            "\n"
        )
    for place, words in PICTURES.items():
        (root / "images" / place).mkdir(exist_ok=True)
        (root / "images" / place / "cover.svg").write_text(f"<svg><text>{words}</text></svg>")
    (root / "book/references.bib").write_text("")
    (root / "requirements.txt").write_text("torch\n")
    (root / "_toc.yml").write_text(
        "format: jb-book\nroot: welcome\nparts:\n  - numbered: 1\n    chapters:\n"
        + "".join(f"      - file: {name}\n" for name in CHAPTERS)
    )
    shutil.copy(REPOSITORY / "_config.yml", root)
    result = build(root)
    assert result.returncode == 0, result.stdout + result.stderr
    assert executed(result) == list(CHAPTERS)
    return root


@pytest.fixture
def book(built, tmp_path):
    return shutil.copytree(built, tmp_path / "book")


def test_a_second_build_executes_and_renders_nothing(book):
    before = kept(book)
    result = build(book)
    assert result.returncode == 0, result.stderr
    assert executed(result) == [] and "rendering" not in result.stdout
    assert kept(book) == before
    assert result.stdout.rstrip().endswith(str(book / "_build/html/index.html"))


def test_a_change_in_a_module_executes_only_what_imports_it(book):
    ring = book / "src/naranhi/ring.py"
    ring.write_text(ring.read_text().replace("sum(range(n))", "sum(range(n)) + 100"))
    result = build(book)
    assert result.returncode == 0, result.stderr
    assert executed(result) == ["01_ring"]
    assert "executing (naranhi.ring changed)" in result.stdout
    for language in WORDS:  # executed once, shown in both
        assert "total 106" in (book / f"_build/html/{language}/01_ring.html").read_text()


def test_a_change_in_a_table_executes_what_uses_its_package(book):
    (book / "src/naranhi/plan/data").mkdir(parents=True)
    (book / "src/naranhi/plan/__init__.py").write_text("")
    table = book / "src/naranhi/plan/data/gpus.csv"
    table.write_text("H100\n")
    write_chapter(book, "02_cost", "import naranhi.plan\nworld = naranhi.World()")
    assert executed(build(book, "--execute-only")) == ["02_cost"]
    table.write_text("H200\n")
    result = build(book, "--execute-only")
    assert executed(result) == ["02_cost"]
    assert "executing (naranhi/plan/data/gpus.csv changed)" in result.stdout


def test_a_cell_that_is_not_plain_python_is_executed_as_it_is(book):
    """A magic that holds another language, one inside a line, and a slip that the build names."""
    source = "t = %sx echo 4\nfrom naranhi import costs\nworld = None\nprint(t)"
    write_chapter(book, "01_ring", source)
    write_chapter(book, "02_cost", "%%bash\nfor i in 1 2; do echo $i; done")
    assert executed(result := build(book, "--execute-only")) == list(CHAPTERS), result.stderr
    assert result.returncode == 0, result.stderr
    costs = book / "src/naranhi/costs.py"
    costs.write_text(costs.read_text() + "\n")
    assert executed(build(book, "--execute-only")) == ["01_ring"]
    write_chapter(book, "01_ring", "print('a'")
    result = build(book, "--execute-only")
    assert result.returncode == 1
    assert "01_ring.ipynb, cell 'run', after" in result.stderr and "SyntaxError" in result.stderr


def test_the_kernel_is_this_interpreter(book, tmp_path):
    """Also where a user has installed another under the same name."""
    spec = tmp_path / "home/.local/share/jupyter/kernels/python3"
    spec.mkdir(parents=True)
    named = {"argv": ["/bin/false"], "display_name": "Python 3", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(named))
    write_chapter(book, "01_ring", "import sys\nprint(sys.executable)")
    command = [sys.executable, BOOK / "build.py", "--root", book, "--execute-only"]
    environment = {**os.environ, "JUPYTER_PATH": str(tmp_path / "home/.local/share/jupyter")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sys.executable in (book / "_build/executed/01_ring.ipynb").read_text()


def test_a_picture_is_in_the_language_of_the_page(built):
    english, korean = (
        (built / f"_build/html/{language}/welcome.html").read_text() for language in WORDS
    )
    assert "<text>side by side</text>" in english and "<text>나란히</text>" not in english
    assert "<text>나란히</text>" in korean and "<text>side by side</text>" not in korean


def test_a_formula_is_together_with_what_follows_it(built):
    page = (built / "_build/html/ko/welcome.html").read_text()
    joined = re.findall(r'<span class="naranhi-joined">(.*?)</span>([^<]*)</span>', page)
    text = [re.sub(r"<[^>]*>|\\[()]", "", "".join(one)) for one in joined]
    assert text == ["x는", "(y),", "z,", "b-th(c)…", "d:"]  # and not what a phone cannot show


def test_each_fold_says_what_is_in_it(built):
    """And no two of a page say the same."""
    labels = {
        "en": [
            *("Show the code of Figure 1.1", "Show the answer"),
            *(
                "Show the set-up · Chapter 01_ring · 1 of 2",
                "Show the set-up · Chapter 01_ring · 2 of 2",
            ),
            *("Show the check", "Show the set-up of exercise 1"),
            *("Show the answer to exercise 1 · 1 of 2", "Show the answer to exercise 1 · 2 of 2"),
            *("In words · exercise 1", "In words · exercise 2"),
        ],
        "ko": [
            *("그림 1.1 코드 펼치기", "답 펼치기"),
            *("준비 코드 펼치기 · 장 01_ring · 1/2", "준비 코드 펼치기 · 장 01_ring · 2/2"),
            *("검사 코드 펼치기", "1번 준비 코드 펼치기"),
            *("1번 답 펼치기 · 1/2", "1번 답 펼치기 · 2/2"),
            *("In words · 1번", "In words · 2번"),
        ],
    }
    for language, expected in labels.items():
        page = (built / f"_build/html/{language}/01_ring.html").read_text()
        found = re.findall(r'<p class="collapsed[^>]*>(.*?)</p>|<summary>([^<]+)</summary>', page)
        assert [one or other for one, other in found] == expected


def test_prose_is_rendered_without_executing(book):
    chapter = book / "notebooks/ko/02_cost.ipynb"
    chapter.write_text(chapter.read_text().replace("보십시오", "보세요"))
    result = build(book)
    assert result.returncode == 0, result.stderr
    assert executed(result) == []
    assert "보세요" in (book / "_build/html/ko/02_cost.html").read_text()


def test_requirements_execute_everything(book):
    (book / "requirements.txt").write_text("torch==2\n")
    result = build(book, "--execute-only")
    assert executed(result) == list(CHAPTERS)
    assert "requirements.txt changed" in result.stdout


def test_lines_of_two_processes_stay_lines(tmp_path):
    """Also unbuffered, where `print` writes a line and its end apart."""
    program = (
        "import sys, multiprocessing\n"
        f"sys.path.insert(0, {str(BOOK)!r})\n"
        "import execution\n"
        "def say(name):\n"
        "    for _ in range(2000):\n"
        "        execution.say(name)\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "    pool.map(say, ['one', 'other'], chunksize=1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-u", "-c", program], capture_output=True, text=True, check=True
    )
    assert sorted(done.stdout.splitlines()) == ["one"] * 2000 + ["other"] * 2000


def test_what_was_executed_beside_another_does_not_stand_for_long(book):
    (book / "requirements.txt").write_text("torch==2\n")
    result = build(book, "--jobs", "2")
    assert result.returncode == 0, result.stderr
    assert sorted(executed(result)) == list(CHAPTERS)
    assert executed(build(book, "--jobs", "2")) == []
    result = build(book, "--execute-only")
    assert executed(result) == list(CHAPTERS)
    assert "executed at the same time as another notebook" in result.stdout
    assert executed(build(book)) == []


MISSED = "✗ faster: it is false (measured)"
BUSY_AT_FIRST = f"""from pathlib import Path
tries = Path("tries")
with tries.open("a") as file:
    file.write("x")
print("{MISSED}" if len(tries.read_text()) < ENOUGH else "✓ faster (measured)")"""


@pytest.mark.parametrize("enough, tries, missed", [(1, 1, 0), (2, 2, 0), (9, 2, 1)])
def test_what_is_measured_otherwise_is_executed_once_more_and_named(book, enough, tries, missed):
    write_chapter(book, "01_ring", BUSY_AT_FIRST.replace("ENOUGH", str(enough)))
    result = build(book, "--execute-only")
    assert result.returncode == 0, result.stderr
    assert len((book / "notebooks/en/tries").read_text()) == tries
    assert result.stdout.count(f"  01_ring: {MISSED}\n") == missed
    again = build(book, "--execute-only")
    assert (executed(again), again.stdout.count(MISSED)) == ([], missed)


def test_of_two_executions_the_one_that_missed_less_stays(book):
    text = BUSY_AT_FIRST.replace("ENOUGH", "9")
    write_chapter(
        book, "01_ring", text + f"\nif len(tries.read_text()) == 2:\n    print('{MISSED}')"
    )
    assert build(book, "--execute-only").stdout.count(MISSED) == 1


def test_what_ranks_say_is_heard():
    said = new_code_cell("", outputs=[new_output("stream", text=f"[ranks 0-3] {MISSED}\n✓ b\n")])
    assert execution.missed(new_notebook(cells=[said])) == [MISSED[2:]]


def test_a_failure_names_its_cell_and_keeps_what_was_good(book):
    before = kept(book)
    page = (book / "_build/html/en/01_ring.html").read_text()
    write_chapter(book, "01_ring", "print('before')\nraise ValueError('rank 2 is odd')")
    result = build(book)
    assert result.returncode == 1
    for part in ("notebooks/en/01_ring.ipynb", "cell 'run'", "ValueError: rank 2 is odd"):
        assert part in result.stderr
    assert kept(book) == before
    assert (book / "_build/html/en/01_ring.html").read_text() == page
    failed = nbformat.read(book / "_build/failed/01_ring.ipynb", as_version=4)
    assert failed.cells[1].outputs[0].text == "before\n"
    assert [cell.id for cell in failed.cells[:5]] == ["title", "run", "figure", "rows", "answer"]


def test_a_notebook_that_takes_too_long_fails(book, monkeypatch):
    monkeypatch.setattr(execution, "SECONDS", 4)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    write_chapter(book, "01_ring", "import time\ntime.sleep(60)")
    before = kept(book)
    with pytest.raises(execution.ExecutionFailed, match=r"cell 'run', after [4-9] s"):
        execution.execute(book / "notebooks/en/01_ring.ipynb", book)
    assert kept(book) == before


def test_a_kernel_that_does_not_start_fails_its_chapter(book, monkeypatch):
    """As where its interpreter is broken; the other chapters are executed."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(execution._Executor, "create_kernel_manager", lambda self: 1 / 0)
    with pytest.raises(execution.ExecutionFailed, match=r"01_ring.ipynb: its kernel did not start"):
        execution.execute(book / "notebooks/en/01_ring.ipynb", book)


def test_a_long_name_of_the_folder_for_temporary_files_is_no_hindrance(book, tmp_path, monkeypatch):
    long = tmp_path / ("scratch-of-a-job" * 6)
    long.mkdir()
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(execution.tempfile, "tempdir", str(long))
    execution.execute(book / "notebooks/en/01_ring.ipynb", book)


def test_an_execution_on_gpus_is_taken_as_it_is(book):
    path = book / "_build/executed/01_ring.ipynb"
    elsewhere = nbformat.read(path, as_version=4)
    elsewhere.metadata["naranhi"]["key"]["device"] = "elsewhere"
    elsewhere.metadata["naranhi"]["executed"] |= {"device": "cuda", "machine": "4 × H200"}
    nbformat.write(elsewhere, path)
    result = build(book)
    assert executed(result) == [] and result.returncode == 0
    assert "4 × H200" in (book / "_build/html/ko/01_ring.html").read_text()
    result = build(book, "--execute-only")
    assert executed(result) == ["01_ring"]
    assert "executed on elsewhere" in result.stdout


def test_a_warning_fails_the_build_and_the_old_pages_stay(book):
    page = book / "book/en/welcome.md"
    page.write_text(page.read_text() + "\n{term}`nonesuch` and {numref}`fig-nonesuch`\n")
    (book / "book/ko/welcome.md").write_text("# Book\n\nnonesuch\n")
    result = build(book)
    assert result.returncode == 1
    assert "nonesuch" in result.stderr and "fig-nonesuch" in result.stderr  # all of them
    for language in WORDS:  # the Korean page, without fault, stays beside its twin
        assert "nonesuch" not in (book / f"_build/html/{language}/welcome.html").read_text()
    assert "en: FAILED" in result.stdout
    assert build(book).returncode == 1  # a warning does not pass by building again


NOWHERE = "{numref}`fig-typo`, {eq}`typo`, {ref}`typo`, {doc}`typo`, {cite:t}`typo`, [](typo.ipynb)"
QUESTION = """:::{admonition} Predict
:class: predict
% name: nowhere
% range: 100

How many?
:::
"""


def test_references_of_a_chapter_that_lead_nowhere_are_named(book):
    path = book / "notebooks/en/02_cost.ipynb"
    chapter = nbformat.read(path, as_version=4)
    chapter.cells.append(new_markdown_cell(NOWHERE, id="nowhere"))
    chapter.cells.append(new_markdown_cell(QUESTION, id="question"))
    nbformat.write(chapter, path)
    result = build(book)
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    assert result.stderr.count("02_cost.ipynb:") == 7  # all of them
    assert "en: FAILED because of the warnings above" in result.stdout


def test_a_figure_may_have_a_caption_without_a_name_or_neither(book):
    for language in WORDS:
        path = book / f"notebooks/{language}/02_cost.ipynb"
        chapter = nbformat.read(path, as_version=4)
        figure = next(cell for cell in chapter.cells if cell.id == "figure")
        bare = new_code_cell(FIGURE, id="bare", metadata={"mystnb": {"figure": {"alt": "A"}}})
        chapter.cells.append(bare)
        del figure.metadata["mystnb"]["figure"]["name"]
        nbformat.write(chapter, path)
    result = build(book)
    assert result.returncode == 0, result.stderr
    cells = readers_notebook(book, "en", "02_cost").cells
    assert [cell.source for cell in cells if cell.id.endswith("-caption")] == ["*A square.*"]


INTERRUPTED = """
import shutil, sys
from pathlib import Path

sys.path.insert(0, BOOK)
import build

remove = shutil.rmtree

def interrupted(folder, *args, **kwargs):
    if not (Path(folder) / ".inputs").exists():
        return remove(folder, *args, **kwargs)
    (Path(folder) / "welcome.html").unlink(missing_ok=True)
    raise KeyboardInterrupt

build.shutil.rmtree = interrupted
if __name__ == "__main__":
    sys.exit(build.main())
"""


def test_half_of_an_old_site_is_not_taken_for_a_whole(book, tmp_path):
    """Interrupted while the old pages are removed; then what was edited is taken back."""
    page = book / "book/en/welcome.md"
    before = page.read_text()
    page.write_text(before + "\nMore.\n")
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED.replace("BOOK", repr(str(BOOK))))
    command = [sys.executable, script, "--root", book]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 130, result.stdout + result.stderr
    page.write_text(before)
    assert build(book).returncode == 0
    assert (book / "_build/html/en/welcome.html").exists()


def test_a_broken_bibliography_is_named(book):
    """Sphinx's exception for it cannot be sent from the process that renders to the build."""
    (book / "book/references.bib").write_text("@article{one, title = {Open,\n\n@misc{two}\n")
    (book / "book/en/welcome.md").write_text("# Book\n\n{cite}`one`\n")
    result = build(book)
    assert result.returncode == 1
    assert "bibtex" in result.stderr and "syntax error in line 3" in result.stderr


STUBBORN = """
import time

def setup(app):
    print("begun", flush=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            time.sleep(end - time.monotonic())
        except KeyboardInterrupt:
            pass
"""


@pytest.mark.parametrize(
    "number, reaches",
    [
        (signal.SIGINT, "all processes"),
        (signal.SIGINT, "the build alone"),
        (signal.SIGTERM, "the build alone"),
        (signal.SIGKILL, "the build alone"),
    ],
)
def test_a_signal_while_pages_are_rendered_ends_the_build(book, number, reaches):
    """An extension of Sphinx stands for the places where Sphinx goes on after an interrupt."""
    (book / "stubborn.py").write_text(STUBBORN)
    config = (book / "_config.yml").read_text()
    extension = f"local_extensions:\n    stubborn: {book}\n"
    (book / "_config.yml").write_text(config.replace("local_extensions:\n", extension))
    command = [sys.executable, BOOK / "build.py", "--root", book]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as building:
        begun = 0
        while begun < len(WORDS):
            line = building.stdout.readline()
            assert line, building.stderr.read()
            begun += line == "begun\n"
        children = [p for p in os.listdir("/proc") if p.isdigit() and parent(p) == building.pid]
        if reaches == "all processes":  # as a terminal does
            os.killpg(building.pid, number)
        else:
            building.send_signal(number)
        try:
            _, stderr = building.communicate(timeout=15)
        finally:
            if building.poll() is None:
                os.killpg(building.pid, signal.SIGKILL)
    if number == signal.SIGINT:
        assert building.returncode == 130
        told = "Interrupted: the old pages stay; the next build goes on from here\n"
        assert stderr.endswith(told)
    else:
        assert building.returncode == {signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    assert len(children) >= len(WORDS)
    end = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in children):
        assert time.monotonic() < end
        time.sleep(0.05)
    for language in WORDS:
        assert (book / f"_build/html/{language}/welcome.html").exists()
    (book / "_config.yml").write_text(config)
    assert build(book).returncode == 0


def parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def test_a_second_build_at_once_is_refused(book):
    """While another renders the same pages; its lock ends with it, however it ends."""
    (book / "stubborn.py").write_text(STUBBORN)
    config = book / "_config.yml"
    extension = f"local_extensions:\n    stubborn: {book}\n"
    config.write_text(config.read_text().replace("local_extensions:\n", extension))
    command = [sys.executable, BOOK / "build.py", "--root", book]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as building:
        try:
            while (line := building.stdout.readline()) != "begun\n":
                assert line
            second = build(book)
        finally:
            os.killpg(building.pid, signal.SIGKILL)
    assert second.returncode == 1 and second.stdout == ""
    assert second.stderr.startswith(f"{book}/_build is in use: process {building.pid} on ")
    assert build(book, "--execute-only").returncode == 0


def under(line: str, book: Path, *, user=()) -> subprocess.CompletedProcess:
    """A build in a namespace of mounts in which a shell line has changed some."""
    program = [sys.executable, BOOK / "build.py", "--root", book]
    # After it, on the same mounts: whether the pages of before are there.
    script = f'{line} && cd / && "$@"; status=$?; cat "$0"/html/*.html >&2; exit $status'
    command = ["unshare", "--mount", "sh", "-c", script, book / "_build", *user, *program]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_a_disk_that_fills_up_is_named_and_the_old_pages_stay(book, needs):
    needs("unshare", "util-linux", as_root=True)
    page = book / "book/en/welcome.md"
    page.write_text(page.read_text() + "\nMore.\n")
    built = book.with_name("built")
    (book / "_build").rename(built)
    (book / "_build").mkdir()
    files = [path.stat().st_size for path in built.rglob("*") if path.is_file()]
    pages = sum(-(-size // 4096) + 1 for size in files) + 16  # of memory, with those of folders
    mount = (
        f"mount -t tmpfs -o size={pages * 4}k none {book}/_build && cp -r {built}/. {book}/_build"
    )
    result = under(mount, book)
    assert result.returncode == 1
    assert "no room is left for" in result.stderr, result.stderr
    assert "make room on its disk and build again; the old pages stay" in result.stderr
    assert "Traceback" not in result.stderr
    assert (built / "html/index.html").read_text() in result.stderr


@pytest.mark.parametrize("who", ["read-only", "another user"])
def test_a_book_that_cannot_be_written_is_refused_in_a_sentence(book, needs, who):
    """The other user may read everything, so that it does not matter where Python is."""
    needs("setpriv", "util-linux", as_root=True)
    may = "+dac_read_search"
    nobody = ["setpriv", "--reuid=65534", "--clear-groups", f"--inh-caps={may}"]
    nobody += [f"--ambient-caps={may}"]
    read_only = f"mount --bind {book} {book} && mount -o remount,ro,bind {book}"
    if who == "read-only":
        result, reason = under(read_only, book), "Read-only file system"
    else:
        result, reason = under("true", book, user=nobody), "Permission denied"
    assert result.returncode == 1 and result.stdout == ""
    told = f"{book}/_build cannot be written ({reason}): build in a copy that is yours\n"
    assert result.stderr == told + "".join(
        (book / "_build/html" / name).read_text() for name in ("404.html", "index.html")
    )


def test_provenance_tells_of_the_execution(built, tmp_path):
    root = shutil.copytree(built, tmp_path / "book", ignore=shutil.ignore_patterns("_build"))
    (root / ".gitignore").write_text("_build\n")
    git = ["git", "-C", root, "-c", "user.name=n", "-c", "user.email=n@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *command], check=True)
    head = execution.commit(root)
    assert len(head) >= 7 and not head.endswith("+")
    (root / "src/naranhi/costs.py").write_text("def seconds(n):\n    return 3 * n\n")
    assert build(root, "--execute-only").returncode == 0
    record = execution.load("02_cost", root).metadata["naranhi"]["executed"]
    assert record["commit"] == head + "+"  # a source differs from the commit
    assert record["device"] == execution.device()
    assert record["torch"] == execution.importlib.metadata.version("torch")
    assert 0 < record["seconds"] < 200 and record["date"][:2] == "20" and record["machine"]
    # The page tells of the execution, not of the build: also when it is built elsewhere, later.
    path = root / "_build/executed/02_cost.ipynb"
    path.write_text(path.read_text().replace(record["date"], "2001-02-03"))
    assert build(root).returncode == 0
    for language in WORDS:
        page = (root / f"_build/html/{language}/02_cost.html").read_text()
        for fact in ("2001-02-03", record["torch"], record["commit"], record["machine"]):
            assert fact in page
        assert "GPU (" in page  # what its ranks used, whatever the machine has
        assert "CPU (" in (root / f"_build/html/{language}/01_ring.html").read_text()
        assert "naranhi-stamp" not in (root / f"_build/html/{language}/welcome.html").read_text()


def test_commit_is_unknown_outside_of_git(tmp_path):
    assert execution.commit(tmp_path) is None


def test_the_commit_of_a_repository_around_a_copy_is_not_its_own(built, tmp_path):
    root = shutil.copytree(built, tmp_path / "copy", ignore=shutil.ignore_patterns("_build"))
    git = ["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=n@example.org"]
    (tmp_path / ".gitignore").write_text("copy\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "another project"]):
        subprocess.run([*git, *command], check=True)
    assert execution.commit(root) is None


def test_commit_is_unknown_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert execution.commit(REPOSITORY) is None


def test_figures_of_cells_are_numbered_and_captioned_in_both_languages(built):
    expected = {"en": ("Figure 1.1", "A square."), "ko": ("그림 1.1", "네모.")}
    for language, (number, caption) in expected.items():
        page = (built / f"_build/html/{language}/01_ring.html").read_text()
        assert f'<span class="std std-numref">{number}</span>' in page  # the reference
        assert f'<span class="caption-number">{number} </span>' in page
        assert f'<span class="caption-text">{caption}</span>' in page


def test_tables_of_cells_are_numbered_in_both_languages(built):
    for language, number in (("en", "Table"), ("ko", "표")):
        first, second = (
            (built / f"_build/html/{language}/{name}.html").read_text() for name in CHAPTERS
        )
        # The first chapter refers to the table of the second.
        assert 'href="02_cost.html#table-02-rows"' in first
        assert f'<span class="std std-numref">{number} 2.1</span>' in first
        for page, chapter, words in (
            (first, 1, '<span class="caption-text">Squares</span>'),
            (second, 2, '<a class="headerlink"'),
        ):
            caption = (
                f'<table class="naranhi-table" id="table-0{chapter}-rows"><caption [^>]*>'
                f'<span class="caption-number">{number} {chapter}.1 </span>' + words
            )
            assert len(re.findall(caption, page)) == 1
        shown = readers_notebook(built, language).cells[4].outputs[0]["data"]["text/html"]
        assert f">{number} 1.1 </span>" in shown


def test_with_addresses_pages_link_to_the_repository_and_name_themselves(book):
    def occurrences():
        pages = sorted((book / "_build/html").glob("*/*.html"))
        return {p.parent.name + "/" + p.name: p.read_text() for p in pages}

    for text in occurrences().values():
        assert "colab" not in text and "naranhi-repository" not in text and "At " not in text
        assert "naranhi-source" not in text
        assert "canonical" not in text and "og:title" not in text
    config = (book / "_config.yml").read_text()
    for setting, address in (
        ('  url: ""', "  url: https://github.com/o/r"),
        ('  baseurl: ""', "  baseurl: https://example.org/book/"),
    ):
        assert setting in config
        config = config.replace(setting, address)
    (book / "_config.yml").write_text(config)
    result = build(book)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = occurrences()
    for language in WORDS:
        colab = "https://colab.research.google.com/github/o/r/blob/main/notebooks/"
        chapter = pages[f"{language}/01_ring.html"]
        assert f'href="{colab}{language}/01_ring.ipynb"' in chapter
        assert 'href="https://github.com/o/r"' in chapter
        for page, file in (
            (chapter, f"notebooks/{language}/01_ring.ipynb"),
            (pages[f"{language}/welcome.html"], f"book/{language}/welcome.md"),
        ):
            assert f'class="naranhi-source" href="https://github.com/o/r/blob/main/{file}"' in page
        assert "naranhi-source" not in pages[f"{language}/search.html"]
        assert "At https://github.com/o/r." in pages[f"{language}/welcome.html"]
        assert "colab.research" not in pages[f"{language}/welcome.html"]
        own = f"https://example.org/book/{language}/01_ring.html"
        assert f'<link rel="canonical" href="{own}"' in chapter
        assert f'<meta property="og:url" content="{own}"' in chapter
        assert f"<loc>{own}</loc>" in (book / "_build/html" / language / "sitemap.xml").read_text()
        first, title, *_ = readers_notebook(book, language).cells
        assert f"[Book]({own.rpartition('/')[0]}/welcome.html): " in title.source
        assert first.source == '%pip install -q "naranhi[book] @ git+https://github.com/o/r"'


def readers_notebook(book, language, name="01_ring"):
    path = book / "_build/html" / language / f"notebooks/{name}.ipynb"
    return nbformat.read(path, as_version=4)


def test_a_readers_notebook_has_words_for_roles_captions_and_outputs(built):
    for language, text, caption in (
        ("en", "See Figure 1.1 and Table 2.1.", "*Figure 1.1. A square.*"),
        ("ko", "그림 1.1과 표 2.1을 보십시오.", "*그림 1.1. 네모.*"),
    ):
        title, run, figure, below, _, answer, *_ = readers_notebook(built, language).cells
        # No page beside the notebooks is a link, unless the site has an address.
        assert title.source.endswith(f"\n\nBook: {text}")
        assert below.source == caption and "<svg" in figure.outputs[0]["data"]["text/html"]
        assert run.outputs[0]["text"] == "total 6\n" and answer.outputs[0]["text"] == "answer 42\n"


def test_modules_used_follows_imports_of_every_form(tmp_path):
    package = tmp_path / "naranhi"
    texts = {
        "__init__.py": "",
        "a.py": "from . import b\n",
        "b.py": "def late():\n    import naranhi.deep.c\n",
        "deep/__init__.py": "",
        "deep/c.py": "from .d import x\n",
        "deep/d.py": "from ..e import y\nx = 1\n",
        "e.py": "y = 1\n",
        "f.py": "",
        "g.py": "command = ['python', '-m', 'naranhi.f']\n",
    }
    for name, text in texts.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(text)

    def names(*sources):
        return [n.removeprefix("naranhi") for n in sorted(execution.modules_used(sources, package))]

    everything = ["", ".a", ".b", ".deep", ".deep.c", ".deep.d", ".e"]
    assert names("%%ranks\nfrom naranhi import a") == everything
    assert names("import naranhi\n", "naranhi.a.late()") == everything
    assert names("from naranhi.e import y") == ["", ".e"]
    assert names("import torch") == []
    assert names("import naranhi.g") == ["", ".f", ".g"]


def test_the_key_speaks_of_cells_modules_and_requirements(built):
    key = execution.load("01_ring", built).metadata["naranhi"]["key"]
    assert list(key["modules"]) == ["naranhi", "naranhi.collectives", "naranhi.ring"]
    now = execution.key(nbformat.read(built / "notebooks/en/01_ring.ipynb", 4), built)
    assert json.loads(json.dumps(now)) == {k: v for k, v in key.items() if k != "device"}


@pytest.mark.parametrize(
    "chapter, module",
    [
        ("05_inter_layer", "naranhi.world.output"),
        ("05_inter_layer", "naranhi.pipeline.channels"),
        ("12_zero", "naranhi.zero.hooks"),
        ("16_three_dimensions", "naranhi.distributed.mesh"),
        ("16_three_dimensions", "naranhi.train.trainer"),
    ],
)
def test_a_chapter_depends_on_what_its_packages_import_on_demand(chapter, module):
    notebook = nbformat.read(REPOSITORY / "notebooks" / "en" / f"{chapter}.ipynb", 4)
    assert module in execution.key(notebook, REPOSITORY)["modules"]


def change_notebook(book: Path, language: str, edit) -> None:
    path = book / "notebooks" / language / "01_ring.ipynb"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def old_format(content):
    content["nbformat_minor"] = 0
    for cell in content["cells"]:
        del cell["id"]


def other_id(content):
    content["cells"][1]["id"] = "other"


def same_id(content):
    content["cells"][2]["id"] = content["cells"][1]["id"]


@pytest.mark.parametrize(
    "edit, words",
    [
        (old_format, "notebooks/ko/01_ring.ipynb: format 4.0 has no cell ids"),
        (same_id, "notebooks/ko/01_ring.ipynb: 2 cells have the id 'run'"),
        (lambda content: content.clear(), "notebooks/ko/01_ring.ipynb: format 1.0 has no cell ids"),
        (other_id, "notebooks/ko/01_ring.ipynb: notebooks/en has no code cell 'other', whose"),
        (None, "notebooks/ko/01_ring.ipynb is not a notebook"),
    ],
)
def test_a_notebook_that_cannot_be_shown_is_named_before_anything_is_executed(book, edit, words):
    if edit:
        change_notebook(book, "ko", edit)
    else:
        (book / "notebooks/ko/01_ring.ipynb").write_text("{")
    (book / "src/naranhi/ring.py").write_text("def total(n):\n    return n\n")
    result = build(book)
    assert result.returncode == 1 and executed(result) == []
    assert words in result.stderr and "Traceback" not in result.stderr


def test_a_chapter_that_is_renamed_in_one_language_is_named(book):
    (book / "notebooks/en/01_ring.ipynb").rename(book / "notebooks/en/01_rings.ipynb")
    result = build(book)
    assert result.returncode == 1 and executed(result) == []
    assert result.stderr.startswith(
        "notebooks/ko/01_ring.ipynb: there is no notebooks/en/01_ring.ipynb, whose outputs"
    )


@pytest.mark.parametrize("content", ['{"cells": [', '{"cells": [], "metadata": {}, "nbformat": 4}'])
def test_an_execution_that_is_damaged_is_made_again(book, content):
    (book / "_build/executed/01_ring.ipynb").write_text(content)
    result = build(book, "--execute-only")
    assert result.returncode == 0 and executed(result) == ["01_ring"]


def test_a_thread_that_a_cell_left_may_print(book):
    talking = (
        "import threading, time\n\ndef talk():\n    while True:\n        time.sleep(0.002)\n"
        "        print('.')\n\nthreading.Thread(target=talk, daemon=True).start()\n"
    )
    for language in ("en", "ko"):
        change_notebook(book, language, lambda c: c["cells"][-2].update(source=talking))
    result = build(book, "--execute-only")
    assert result.returncode == 0, result.stderr


def test_names_of_python_may_be_given_away(book):
    change_notebook(
        book, "en", lambda c: c["cells"][1].update(source="type = sorted = globals = 1")
    )
    result = build(book, "--execute-only")
    assert result.returncode == 0, result.stderr
    record = execution.load("01_ring", book).metadata["naranhi"]["executed"]
    assert record["backends"] == []


def test_no_notebook_at_a_time_is_refused(book):
    result = build(book, "--jobs", "0")
    assert result.returncode == 2 and "--jobs 0: at least one notebook" in result.stderr


def test_a_locale_of_other_characters_changes_nothing(book):
    ring = book / "src/naranhi/ring.py"
    ring.write_text(ring.read_text() + "# 링\n", encoding="utf-8")
    command = [sys.executable, BOOK / "build.py", "--root", book, "--execute-only"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
