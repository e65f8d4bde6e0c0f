"""Build the book: ``python book/build.py``.

Executes each notebook of ``notebooks/en`` whose outputs no longer stand (see ``execution.py``),
gives the outputs to both languages, and renders ``_build/html/en``, ``_build/html/ko`` and the
landing page ``_build/html/index.html``.  When nothing has changed it does none of these.

    python book/build.py                    the whole book
    python book/build.py --print            and as PDF and ePub, in _build/print (printed.py)
    python book/build.py --execute-only     the executions alone, for this machine's kind of device
    python book/build.py --jobs 2           two notebooks at a time: sooner, but they disturb what
                                            they measure (a build without executes them again)
    python book/build.py --record           write down what the chapters showed (outputs.py)
    python book/build.py --declare-equal    say that both languages now say the same (parity.py)

A figure with a number and a caption comes from a code cell with this in its metadata: the same
``name`` and a caption of its own in each language.  The cell displays one thing (what it prints
besides does no harm), and the text refers to it by {numref}`fig-ring`:

    "mystnb": {"figure": {"name": "fig-ring", "caption": "The ring, step by step."}}

A code cell tagged ``hide-cell`` is folded with its outputs, as the answer to an exercise; one
tagged ``hide-input`` shows its outputs and folds its code.
"""

import argparse
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import execution
import nbformat
import outputs
import parity
import yaml
from alone import CannotBuild, alone, refuse_full
from languages import BY_CODE, EXECUTED


@contextlib.contextmanager
def workers(number: int):
    """A pool of processes, which are killed when the block fails or is interrupted."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(number, context, initializer=depend_on_the_parent)
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        for process in multiprocessing.active_children():
            process.kill()
        raise


def depend_on_the_parent():
    """In a worker: leave Ctrl-C to the parent, and end when it ends, even if it was killed.

    A terminal's Ctrl-C reaches all processes, and Sphinx goes on after some.
    """
    # Not SIG_IGN, which the kernels of notebooks would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    threading.Thread(target=end_with_the_parent, daemon=True).start()


def end_with_the_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


def executions(root: Path, only_here: bool, jobs: int) -> bool:
    """Execute what has to be executed; whether all notebooks now have their outputs.

    Args:
        only_here: an execution on another kind of device does not count.
        jobs: how many at a time; an execution beside more others does not count.
    """
    here = {"device": execution.device()} if only_here else {}
    one = partial(executed, root=root, here=here, jobs=jobs)
    sources = sorted((root / "notebooks" / EXECUTED).glob("*.ipynb"))
    if wrong := parity.unusable(root):
        raise CannotBuild("\n".join(wrong))
    if jobs == 1:
        failures = list(map(one, sources))
    else:
        # OpenMP's threads would wait for each other by spinning, on the cores of the others.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        with workers(jobs) as pool:
            failures = list(pool.map(one, sources))
    for failure in filter(None, failures):
        print(f"\n{failure}", file=sys.stderr)
    return not any(failures)


def executed(source: Path, root: Path, here: dict, jobs: int) -> str | None:
    """Execute a notebook if it has to be; what failed, if something did."""
    now = {**execution.key(nbformat.read(source, as_version=4), root), **here}
    reason = execution.why_stale(execution.load(source.stem, root), now, jobs)
    if reason is None:
        execution.say(f"  {source.stem}: up to date")
        return None
    execution.say(f"  {source.stem}: executing ({reason})")
    try:
        notebook = execution.execute(source, root, jobs)
        missed = execution.missed(notebook)
        # The machine may have been busy for a while. Beside another notebook it would be again.
        if missed and jobs == 1:
            what = "; ".join(missed)
            execution.say(f"  {source.stem}: once more, because measured times contradict: {what}")
            again = execution.execute(source, root, jobs)
            if len(execution.missed(again)) > len(missed):
                execution.save(notebook, execution.place(source.stem, root))
    except execution.ExecutionFailed as failure:
        execution.say(f"  {source.stem}: FAILED")
        return str(failure)
    return None


def report_missed(root: Path) -> None:
    """Name the claims about times that were false on this machine."""
    for source in sorted((root / "notebooks" / EXECUTED).glob("*.ipynb")):
        for claim in execution.missed(execution.load(source.stem, root)):
            print(f"  {source.stem}: ✗ {claim}")


def rendered(*arguments) -> bool:
    """Return what `render.render` returns.

    Raises:
        CannotBuild: the disk is full.
        RuntimeError: with the traceback of what it raised: some of Sphinx's exceptions cannot be
            sent to another process, and would end the pool of workers without a word.
    """
    import render

    try:
        return render.render(*arguments)
    except Exception as error:
        refuse_full(error, arguments[2])
        raise RuntimeError(traceback.format_exc()) from None


def site(root: Path) -> bool:
    """Render the languages whose pages changed; whether the whole site now stands."""
    import pyodide
    import render

    pyodide.fetch(root)
    html = root / "_build" / "html"
    fresh = root / "_build" / "fresh"
    tasks = {}
    with workers(len(BY_CODE)) as pool:
        for language in BY_CODE:
            folder, inputs = render.stage(language, root)
            stamp = html / language / ".inputs"
            if stamp.exists() and stamp.read_text(encoding="utf-8") == inputs:
                print(f"  {language}: up to date")
                continue
            print(f"  {language}: rendering", flush=True)
            shutil.rmtree(fresh / language, ignore_errors=True)
            task = pool.submit(rendered, language, folder, fresh / language, root)
            tasks[language] = inputs, task
    failed = [language for language, (_, task) in tasks.items() if not task.result()]
    if failed:
        # Both stay: a new page in one language would have no twin in the other.
        print(f"  {', '.join(failed)}: FAILED because of the warnings above; the old pages stay")
        return False
    html.mkdir(parents=True, exist_ok=True)
    for language, (inputs, _) in tasks.items():
        (fresh / language / ".inputs").write_text(inputs, encoding="utf-8")
        # Aside first: half of an old site that says it is up to date would be taken for a whole.
        before = fresh / f"{language} before"
        shutil.rmtree(before, ignore_errors=True)
        if (html / language).exists():
            (html / language).rename(before)
        (fresh / language).rename(html / language)
        shutil.rmtree(before, ignore_errors=True)
    first = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))["root"]
    execution.write(html / "index.html", render.landing(first))
    published = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8")).get("html") or {}
    execution.write(html / "404.html", render.not_found(first, published.get("baseurl") or ""))
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the book.")
    default = Path(__file__).resolve().parent.parent
    parser.add_argument("--root", type=Path, default=default, help="the folder of _config.yml")
    parser.add_argument("--execute-only", action="store_true", help="execute notebooks only")
    parser.add_argument("--print", action="store_true", help="make a PDF and an ePub as well")
    parser.add_argument("--jobs", type=int, default=1, help="notebooks executed at a time, from 1")
    parser.add_argument(
        "--declare-equal",
        nargs="*",
        metavar="PAGE",
        help="record that both languages say the same now, on these pages or on all",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="write down what the executed chapters showed, for tests to compare with",
    )
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: at least one notebook is executed at a time")
    root = options.root.resolve()
    if options.declare_equal is not None:
        parity.declare_equal(root, options.declare_equal)
        return 0
    if options.record:
        missing = outputs.record(root)
        if missing:
            print(f"Not executed as they are: {', '.join(missing)}", file=sys.stderr)
        return 1 if missing else 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left behind
    try:
        with alone(root / "_build"):
            return build(root, options)
    except CannotBuild as refused:
        print(refused, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted: the old pages stay; the next build goes on from here", file=sys.stderr)
        return 130


def build(root: Path, options: argparse.Namespace) -> int:
    """What the command line asks for; the status to exit with."""
    started = time.monotonic()
    if not options.execute_only and (wrong := parity.without_parts(root)):
        raise CannotBuild("\n".join(wrong))
    print("Executing notebooks")
    if not executions(root, options.execute_only, options.jobs):
        return 1
    report_missed(root)
    if options.execute_only:
        print(f"Executed notebooks: {root / '_build' / 'executed'}")
        return 0
    print("Rendering pages")
    if not site(root):
        return 1
    if options.print:
        import printed

        print("Printing books")
        printed.books(root)
    print("Live pages need a server: python3 -m http.server --directory _build/html")
    print(f"Done in {time.monotonic() - started:.0f} s. Open {root / '_build/html/index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
