"""Where the Python of the live pages comes from."""

import io
import json
import subprocess
import tarfile
import zipfile
from types import SimpleNamespace

import pyodide
import pytest


@pytest.fixture
def book(tmp_path):
    """A project with a page that has a lab."""
    page = tmp_path / "book/en/lab.md"
    page.parent.mkdir(parents=True)
    page.write_text("# A lab\n\n```{lab} schedule\n```\n")
    return tmp_path


def package():
    """A package as npm's, but small."""
    library = io.BytesIO()
    with zipfile.ZipFile(library, "w") as archive:
        for name in ("json/__init__.py", "tkinter/__init__.py", "pdb.py", "csv.py"):
            archive.writestr(name, "x = 1\n")
    files = {name: b"file" for name in pyodide.FILES}
    files |= {"python_stdlib.zip": library.getvalue()}
    files |= {"pyodide-lock.json": json.dumps({"info": {}, "packages": {"numpy": {}}}).encode()}
    result = io.BytesIO()
    with tarfile.open(fileobj=result, mode="w:gz") as archive:
        for name, content in files.items():
            item = tarfile.TarInfo(f"package/{name}")
            item.size = len(content)
            archive.addfile(item, io.BytesIO(content))
    return result.getvalue()


def test_a_book_without_a_lab_fetches_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(pyodide, "_pack", lambda: pytest.fail("it was fetched"))
    pyodide.fetch(tmp_path)


def test_another_package_than_the_pinned_one_is_not_used(book, monkeypatch, capsys):
    monkeypatch.setattr(pyodide, "_pack", package)
    pyodide.fetch(book)
    assert "has the hash sha512-" in capsys.readouterr().out
    assert pyodide.sizes(book) is None


def test_two_builds_fetch_once(book, monkeypatch, capsys):
    fetched = []
    monkeypatch.setattr(pyodide, "_pack", lambda: fetched.append(1) or package())
    digest = pyodide.hashlib.sha512(package()).digest()
    monkeypatch.setattr(pyodide, "INTEGRITY", "sha512-" + pyodide.base64.b64encode(digest).decode())
    pyodide.fetch(book)
    pyodide.fetch(book)
    assert (fetched, capsys.readouterr().out) == ([1], "")
    folder = pyodide.folder(book)
    assert json.loads((folder / "pyodide-lock.json").read_text())["packages"] == {}
    with zipfile.ZipFile(folder / "python_stdlib.zip") as library:
        assert library.namelist() == ["json/__init__.py", "csv.py"]
    files = [path for path in folder.iterdir() if path.name != "manifest.json"]
    assert pyodide.sizes(book)[0] == sum(path.stat().st_size for path in files)


@pytest.mark.parametrize(
    "which, run, said",
    [
        (lambda _: None, None, "npm is not installed"),
        (
            lambda _: "/npm",
            lambda *_, **__: SimpleNamespace(returncode=1, stderr="npm error code ENOTFOUND\n"),
            "npm error code ENOTFOUND",
        ),
    ],
)
def test_without_npm_or_a_network_the_build_says_that_pages_are_static(
    book, monkeypatch, capsys, which, run, said
):
    monkeypatch.setattr(pyodide.shutil, "which", which)
    monkeypatch.setattr(subprocess, "run", run)
    pyodide.fetch(book)
    assert capsys.readouterr().out == (
        f"  Live pages stay static, because Pyodide could not be fetched: {said}\n"
    )
    assert pyodide.sizes(book) is None
