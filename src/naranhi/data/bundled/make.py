"""Make the corpus and the tokenizer again: `python src/naranhi/data/bundled/make.py`.

The sources are Python's help texts and docstrings and this book's English pages, as they are now.
Python's texts differ by version, and the book grows. So the output is kept in the repository, and
made again only when a newer one is wanted. The same texts give the same files, to the byte.
"""

import ast
import gzip
import json
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
BOOK = HERE.parents[3]
VOCABULARY = 512
NOT_PYTHONS_OWN = re.compile("copyright|licen[cs]e", re.IGNORECASE)  # files with other terms
LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "tkinter",
    "turtledemo",
    "distutils",
    "site-packages",
    "ensurepip",
    "pydoc_data",
}


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a page that are prose, each on one line, as in SQuAD."""
    text = re.sub(r"^(```|~~~|:::).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\{[\w:]+\}`([^`]*)`", r"\1", text)  # a role of MyST: what it is applied to
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        code = any(sign in line for sign in ("::=", ">>>", "$$", "](", "|"))
        if len(line) >= 80 and ". " in line + " " and not code and re.match(r"[\w\"*`]", line):
            yield line


def book_pages() -> Iterator[tuple[str, str]]:
    """Yield (title, text in Markdown) of the book's pages and chapters."""
    for path in sorted((BOOK / "book" / "en").glob("*.md")):
        yield path.stem, path.read_text()
    for path in sorted((BOOK / "notebooks" / "en").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        prose = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        yield path.stem, "\n\n".join(prose)


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield (module, its docstrings) of the standard library, except files with other terms."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        where = path.relative_to(library)
        source = path.read_text("latin1")
        if LEFT_OUT & set(where.parts) or NOT_PYTHONS_OWN.search(source):
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        passages = [
            ast.get_docstring(node)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, documented)
        ]
        name = ".".join(where.with_suffix("").parts).removesuffix(".__init__")
        yield name, "\n\n".join(text for text in passages if text and text.isascii())


def articles() -> Iterator[dict[str, Any]]:
    """Yield entries of SQuAD's `data`: a title and paragraphs, without questions or repetitions."""
    seen = set()
    for title, text in (*sorted(topics.items()), *docstrings(), *book_pages()):
        fresh = [line for line in dict.fromkeys(paragraphs(text)) if line not in seen]
        seen.update(fresh)
        if fresh:
            yield {
                "title": title,
                "paragraphs": [{"context": context, "qas": []} for context in fresh],
            }


def tokenizer(contexts: Iterable[str]) -> Tokenizer:
    """Train byte-level BPE like GPT-2's, with fewer tokens; its one special token ends a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.train_from_iterator(
        contexts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<|endoftext|>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return made


def main() -> None:
    """Write the corpus, the tokenizer and the licence of Python's texts beside this file."""
    data = list(articles())
    contexts = [paragraph["context"] for article in data for paragraph in article["paragraphs"]]
    version = f"Naranhi's pages, and texts of Python {platform.python_version()}"
    squad = json.dumps({"version": version, "data": data}, ensure_ascii=False, indent=0)
    with (
        open(HERE / "corpus.json.gz", "wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed,
    ):
        packed.write(squad.encode())
    tokenizer(contexts).save(str(HERE / "tokenizer.json"), pretty=False)
    licence = Path(sysconfig.get_path("stdlib"), "LICENSE.txt")
    (HERE / "LICENSE-python.txt").write_text(licence.read_text())
    print(f"{len(contexts)} contexts of {len(data)} pages, {sum(map(len, contexts))} characters")


if __name__ == "__main__":
    main()
