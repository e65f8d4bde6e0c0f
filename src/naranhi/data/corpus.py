"""Text to train on: the passages of SQuAD, of a file, or those that ship with the book.

SQuAD: Rajpurkar, Zhang, Lopyrev and Liang, "SQuAD: 100,000+ questions for machine comprehension of
text" (2016). Only its passages ("contexts") are used here. naranhi/data/bundled/LICENSE.md lists
what ships with the book, and under which licences.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from naranhi.models.hub import fetching, offline

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUNDLED = Path(__file__).parent / "bundled"
UNPACKING = OSError, EOFError, zlib.error  # what reading a badly packed file raises
SURROGATES = re.compile("[\ud800-\udfff]")  # halves of characters, which UTF-8 cannot encode


def contexts(source: str | os.PathLike[str] | None = None) -> list[str]:
    """Return the passages in the order of the source, each as often as the source has it.

    Args:
        source: None for the book's own; "squad" for SQuAD from the hub, with a passage once for
            each question on it; else the path of a file, which gzip may have packed (".gz"): of
            text (".txt"), with blank lines between passages; of JSON lines (".jsonl"), each with a
            passage as its "text"; or else of JSON in SQuAD's form.

    Raises:
        OSError: if the file does not exist or the hub cannot be reached; it says what to do.
        ValueError: if the source is empty or not in its form; it names the file and the place.
    """
    if source == "squad":
        passages = _squad()
    else:
        passages = _read(BUNDLED / "corpus.json.gz" if source is None else Path(source))
    passages = [context for context in passages if context.strip()]
    if not passages:
        raise ValueError(f"the corpus {source} has no passage with text in it")
    return passages


def unique(contexts: Iterable[str]) -> list[str]:
    """Return each context once, in the order of first occurrence."""
    return list(dict.fromkeys(contexts))


def tokenizer(name: str | os.PathLike[str] | None = None) -> PreTrainedTokenizerBase:
    """Return the book's tokenizer, or that of a model: byte-level BPE, which can encode any text.

    The padding token is the end-of-text token if the tokenizer has no other; the mask distinguishes
    the two.

    Args:
        name: None for the book's own, with a vocabulary of 512 tokens; a name on the hub ("gpt2"),
            or a model's folder.

    Raises:
        OSError: if the tokenizer is not on this machine and cannot be fetched; it says what to do.
        ValueError: if its files are damaged, or it has no token to pad with.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if name is None:
        return PreTrainedTokenizerFast(
            tokenizer_file=str(BUNDLED / "tokenizer.json"),
            eos_token="<|endoftext|>",
            pad_token="<|endoftext|>",
        )
    name = os.fspath(name)
    advice = (
        "The folder has no tokenizer; save_pretrained of the tokenizer writes one."
        if os.path.isdir(name)
        else offline(name)
    )
    with fetching(f"tokenizer of {name!r}", advice):
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            empty = not tokenizer("a")["input_ids"]
        except OSError:
            raise
        except Exception as error:  # several libraries raise their own types
            cause = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ValueError(
                f"no tokenizer can be made of the files of {name!r} ({cause})"
            ) from error
        if empty:  # from other files transformers makes a tokenizer without tokens
            raise OSError("neither tokenizer.json nor vocab.json")
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"the tokenizer of {name!r} has neither a padding token nor an end-of-text token: "
                "set pad_token in its tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _squad():
    import datasets

    advice = (
        "Not cached, and the hub is unreachable. Where there is a connection, "
        "download train-v1.1.json from https://rajpurkar.github.io/SQuAD-explorer/, copy it here "
        "and give its path instead of the name: --corpus train-v1.1.json. Or copy the cache (the "
        "folder that HF_HOME names) from a machine that has loaded SQuAD before. Or do without: by "
        "default, the corpus that ships with the book is used."
    )
    with fetching("SQuAD", advice), _without_bars():
        return datasets.load_dataset("rajpurkar/squad", split="train")["context"]


def _read(path):
    if not path.is_file():
        there = "is not a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"the corpus {path} {there}")
    packed = path.read_bytes()
    if not packed:
        raise ValueError(f"the corpus {path} is empty")
    ending = Path(path.name.lower().removesuffix(".gz")).suffix
    form, read = FORMS.get(ending, (SQUAD, _articles))
    try:
        text = gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed
        return read(text.decode("utf-8-sig"))
    except (ValueError, *UNPACKING) as error:
        others = "" if ending in (".json", *FORMS) else "; text is read from files named .txt"
        raise ValueError(f"the corpus {path} is not {form}: {error}{others}") from None


def _paragraphs(text):
    """Return the passages between blank lines."""
    return re.split(r"\n\s*\n", text.strip().replace("\r\n", "\n"))


def _lines(text):
    """Return the "text" of the JSON object on each line."""
    passages = []
    for number, line in enumerate(text.split("\n"), 1):  # a text may have other separators
        if line.strip():
            entry = _json(line, f"line {number} is ")
            passage = entry.get("text") if isinstance(entry, dict) else None
            if fault := _fault_of(passage):
                raise ValueError(f'the "text" of line {number} {fault}')
            passages.append(passage)
    return passages


def _articles(text):
    """Return the contexts of SQuAD's articles."""
    content = _json(text, "it is ")
    if fault := _fault_in(content):
        raise ValueError(fault)
    articles = content["data"]
    return [paragraph["context"] for article in articles for paragraph in article["paragraphs"]]


SQUAD = 'in SQuAD\'s form, {"data": [{"paragraphs": [{"context": "..."}, ...]}, ...]}'
FORMS: dict[str, tuple[str, Callable[[str], list[str]]]] = {
    ".txt": ("text in UTF-8, with blank lines between passages", _paragraphs),
    ".jsonl": ('lines of JSON, {"text": "..."}', _lines),
}


def _json(text, where):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}not JSON ({error})") from None


def _fault_of(passage):
    """Return what is wrong with a passage, or None if it is text that can be encoded."""
    if not isinstance(passage, str):
        return "is missing, or not a string"
    if SURROGATES.search(passage):
        return "contains half of a character (a surrogate)"
    return None


def _fault_in(content):
    """Return the first place that is not in SQuAD's form, and why; None if there is none."""
    if not isinstance(content, dict) or "data" not in content:
        return 'it has no "data"'
    articles = content["data"]
    if not isinstance(articles, list):
        return "data is not a list"
    if not articles:
        return "data is empty"
    for i, article in enumerate(articles):
        paragraphs = article.get("paragraphs") if isinstance(article, dict) else None
        if not isinstance(paragraphs, list):
            return f'data[{i}] has no list of "paragraphs"'
        for j, paragraph in enumerate(paragraphs):
            context = paragraph.get("context") if isinstance(paragraph, dict) else None
            if fault := _fault_of(context):
                return f'the "context" of data[{i}].paragraphs[{j}] {fault}'
    if not any(article["paragraphs"] for article in articles):
        return "no article has a paragraph"
    return None


@contextmanager
def _without_bars():
    """Hide the progress bars of `datasets` inside the context."""
    import datasets

    before = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            datasets.enable_progress_bars()
