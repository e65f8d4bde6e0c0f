"""Text to train on: the passages of SQuAD, of a file in its form, or those that ship with the book.

SQuAD: Rajpurkar, Zhang, Lopyrev and Liang, "SQuAD: 100,000+ questions for machine comprehension of
text" (2016). Only its passages ("contexts") are of use here. What ships, and under which licences,
is written in naranhi/data/bundled/LICENSE.md.
"""

import glob
import gzip
import json
import os
import tempfile
import zlib
from contextlib import contextmanager
from pathlib import Path

from naranhi.models.hub import fetching, offline

BUNDLED = Path(__file__).parent / "bundled"
UNPACKING = OSError, EOFError, zlib.error  # what a file that is badly packed leads to
FORM = '{"data": [{"paragraphs": [{"context": "..."}, ...]}, ...]}'


def contexts(source=None):
    """The passages, a list of strings in the order of the source, and as often as it has them.

    source: None for those of the book; "squad" for SQuAD from the hub, a passage once for each
    question on it; else the path of a JSON file (it may be packed by gzip) in SQuAD's form.

    Raises OSError when there is no such file, or when the hub cannot be reached, and says what to
    do; ValueError, naming the file and the place, when it is empty or not in SQuAD's form.
    """
    if source == "squad":
        found = _squad()
    else:
        found = _read(BUNDLED / "corpus.json.gz" if source is None else Path(source))
    found = [context for context in found if context.strip()]
    if not found:
        raise ValueError(f"the corpus {source} has no passage with text in it")
    return found


def unique(contexts):
    """Each context once, where it came first."""
    return list(dict.fromkeys(contexts))


def tokenizer(name=None):
    """The book's tokenizer, or that of a model: byte-level BPE, so that it can write any text.

    name: None for the book's own 512 words; a name on the hub ("gpt2"), or a model's folder.
    Its padding is its token for the end of a text, where it has no other; the mask tells the two
    apart. Raises OSError, and says what to do, when it is neither here nor to be fetched.
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
        found = AutoTokenizer.from_pretrained(name)
        if not found("a")["input_ids"]:  # transformers makes one without words of the model's kind
            raise OSError("neither tokenizer.json nor vocab.json")
    if found.pad_token_id is None:
        found.pad_token = found.eos_token
    return found


def _squad():
    import datasets

    advice = (
        "It was neither in the cache nor to be had from the hub. Where there is a connection, "
        "download train-v1.1.json from https://rajpurkar.github.io/SQuAD-explorer/, copy it here "
        "and give its path instead of the name: --corpus train-v1.1.json. Or copy the cache (the "
        "folder that HF_HOME names) from a machine that has loaded SQuAD before. Or do without: by "
        "default, the corpus that ships with the book is used."
    )
    with fetching("SQuAD", advice), _without_bars():
        return datasets.load_dataset("rajpurkar/squad", split="train")["context"]


def _read(path):
    import datasets

    if not path.is_file():
        there = "is no file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"the corpus {path} {there}")
    if not path.stat().st_size:
        raise ValueError(f"the corpus {path} is empty")
    # A cache of its own: nothing stays behind, and nothing old is found for a file that changed.
    with tempfile.TemporaryDirectory() as cache, _without_bars():
        try:
            articles = datasets.load_dataset(
                "json",
                data_files=glob.escape(str(path.absolute())),
                field="data",
                split="train",
                cache_dir=cache,
            ).to_list()
        except (datasets.exceptions.DatasetGenerationError, ValueError, *UNPACKING) as error:
            cause = error.__cause__ or error
            fault = _fault(path) or str(cause)
            raise ValueError(f"the corpus {path} is not in SQuAD's form, {FORM}: {fault}") from None
    if fault := _fault_in(articles):
        raise ValueError(f"the corpus {path} is not in SQuAD's form, {FORM}: {fault}")
    return [one["context"] for article in articles for one in article["paragraphs"]]


def _fault(path):
    """Why a file that `datasets` could not read is not in SQuAD's form, or None."""
    try:
        content = path.read_bytes()
        content = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    except (ValueError, *UNPACKING) as error:
        return f"it is no JSON ({error})"
    if not isinstance(content, dict) or "data" not in content:
        return 'it has no "data"'
    return _fault_in(content["data"])


def _fault_in(articles):
    """What is not as it should be in SQuAD's `data`, and where; None when all is well."""
    if not isinstance(articles, list):
        return "data is not a list"
    if not articles:
        return "data is empty"
    for i, article in enumerate(articles):
        paragraphs = article.get("paragraphs") if isinstance(article, dict) else None
        if not isinstance(paragraphs, list):
            return f'data[{i}] has no list of "paragraphs"'
        for j, paragraph in enumerate(paragraphs):
            if not isinstance(paragraph, dict) or not isinstance(paragraph.get("context"), str):
                return f'data[{i}].paragraphs[{j}] has no text as its "context"'
    if not any(article["paragraphs"] for article in articles):
        return "no article has a paragraph"
    return None


@contextmanager
def _without_bars():
    """Without the progress bars of `datasets`."""
    import datasets

    before = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            datasets.enable_progress_bars()
