"""Python for the live pages: Pyodide from npm, pinned by its hash, fetched once into ``_build``.

The lab's extension copies what is here beside the static files of the site. Without npm or without
a network the book builds all the same: the build says so, and the pages stay static.
"""

import base64
import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

VERSION = "314.0.7"
INTEGRITY = (  # of the package, as npm writes it
    "sha512-0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R"
    "1A=="
)
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm")
# Of Python's library, what no lab needs: a third of what a reader would load.
LEFT_OUT = """
    _pyrepl bdb calendar curses dbm difflib doctest email ensurepip ftplib html http idlelib
    imaplib ipaddress lib2to3 mailbox mimetypes multiprocessing netrc optparse pdb pickletools
    plistlib poplib profile pstats pydoc pydoc_data smtplib socketserver sqlite3 test tkinter
    tomllib trace turtle turtledemo unittest uuid venv webbrowser wsgiref xml xmlrpc zoneinfo
"""


def folder(root: Path) -> Path:
    """Where the files are, or will be."""
    return root / "_build" / "pyodide" / VERSION


def used(root: Path) -> bool:
    """Whether a page of the book has a lab."""
    pages = [*root.glob("book/*/*.md"), *root.glob("notebooks/*/*.ipynb")]
    return any("```{lab}" in page.read_text(encoding="utf-8") for page in pages)


def sizes(root: Path) -> tuple[int, int] | None:
    """The bytes of all files, as they are and compressed; None if they are not there."""
    manifest = folder(root) / "manifest.json"
    if not manifest.exists():
        return None
    found = json.loads(manifest.read_text(encoding="utf-8"))
    return found["bytes"], found["compressed"]


def fetch(root: Path) -> None:
    """Fetch the runtime if a page needs it and it is not there; say so if it cannot be had."""
    if sizes(root) or not used(root):
        return
    try:
        package = _pack()
        digest = "sha512-" + base64.b64encode(hashlib.sha512(package).digest()).decode()
        if digest != INTEGRITY:
            raise OSError(f"npm's pyodide {VERSION} has the hash {digest}, not {INTEGRITY}")
        _unpack(package, folder(root))
    except (OSError, subprocess.SubprocessError) as error:
        print(
            f"  Live pages stay static, because Pyodide could not be fetched: {error}", flush=True
        )


def _pack():
    """Return npm's package as bytes."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    with tempfile.TemporaryDirectory() as place:
        command = [npm, "pack", f"pyodide@{VERSION}", "--ignore-scripts"]
        command += ["--fetch-retries=1", "--fetch-timeout=20000"]  # milliseconds, for an answer
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise OSError((done.stderr.strip().splitlines() or ["npm pack failed"])[0])
        [package] = Path(place).glob("*.tgz")
        return package.read_bytes()


def _unpack(package, target):
    """Write the files that a page loads, the last of all the manifest."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        files = {name: archive.extractfile(f"package/{name}").read() for name in FILES}
        library = archive.extractfile("package/python_stdlib.zip").read()
        lock = json.load(archive.extractfile("package/pyodide-lock.json"))
    files["python_stdlib.zip"] = trimmed(library)
    files["pyodide-lock.json"] = json.dumps({**lock, "packages": {}}).encode()
    for name, content in files.items():
        (target / name).write_bytes(content)
    found = {
        "version": VERSION,
        "bytes": sum(map(len, files.values())),
        "compressed": sum(len(gzip.compress(content)) for content in files.values()),
    }
    (target / "manifest.json").write_text(json.dumps(found))


def trimmed(library: bytes) -> bytes:
    """Return Python's library without the modules that no lab needs."""
    result = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(library)) as whole,
        zipfile.ZipFile(result, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as part,
    ):
        for item in whole.infolist():
            if item.filename.partition("/")[0].removesuffix(".py") not in LEFT_OUT.split():
                part.writestr(item, whole.read(item), zipfile.ZIP_DEFLATED)
    return result.getvalue()
