"""The text to train on, from the book's own files, from files made here, and from an absent hub."""

import gzip
import json
import math
import os
import socket
import subprocess
import sys

import datasets
import pytest
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from naranhi import data
from naranhi.data import corpus

SQUAD = {
    "version": "1.1",
    "data": [
        {
            "title": "Warsaw",
            "paragraphs": [
                {
                    "context": "One of the most famous people.",
                    "qas": [
                        {
                            "id": "1",
                            "question": "Who?",
                            "answers": [{"text": "people", "answer_start": 23}],
                        }
                    ],
                },
                {"context": "It rains.\nOften.", "qas": []},
            ],
        },
        {"title": "empty", "paragraphs": []},
        {
            "title": "바르샤바",
            "paragraphs": [
                {"context": "비가 온다.", "qas": []},
                {"context": " ", "qas": []},
                {"context": "It rains.\nOften.", "qas": []},
            ],
        },
    ],
}
PASSAGES = [
    "One of the most famous people.",
    "It rains.\nOften.",
    "비가 온다.",
    "It rains.\nOften.",
]


@pytest.fixture(scope="module")
def bundled():
    return data.contexts()


# --- what ships ----------------------------------------------------------------------------------


def test_a_few_thousand_passages_ship_and_their_licences(bundled):
    assert 3000 < len(bundled) < 6000
    assert data.unique(bundled) == bundled
    assert all(len(one) >= 80 and "\n" not in one for one in bundled)
    assert sum(file.stat().st_size for file in corpus.BUNDLED.iterdir() if file.is_file()) < 2e6
    assert (
        "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2"
        in (corpus.BUNDLED / "LICENSE-python.txt").read_text()
    )


def test_what_ships_is_in_squads_form():
    with gzip.open(corpus.BUNDLED / "corpus.json.gz", "rt") as file:
        content = json.load(file)
    assert set(content) == {"version", "data"}
    for article in content["data"]:
        assert set(article) == {"title", "paragraphs"}
        assert all(set(one) == {"context", "qas"} for one in article["paragraphs"])


def test_the_tokenizer_writes_any_text_and_was_trained_on_this_one(bundled):
    tokenizer = data.tokenizer()
    for text in ("a = 'b'\n\tc", "나란히 간다", "naïve ≠ \U0001f600", *bundled[::500]):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 512
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0
    sequences = data.encode(tokenizer, bundled, 128)
    assert max(map(len, sequences)) == 128
    assert len(sequences) == len(bundled)
    used = {token for tokens in sequences for token in tokens}
    assert len(used) > 0.7 * 512
    assert 0 not in used, "no text has the padding token in it"
    assert 4 < data.unigram_entropy(sequences) < math.log(512)
    characters = sum(map(len, bundled))
    tokens = sum(map(len, tokenizer(bundled)["input_ids"]))
    assert tokens < characters / 2


def test_passages_with_nothing_to_predict_are_left_out():
    tokenizer = data.tokenizer()
    long = "ab " * 99
    assert data.encode(tokenizer, ["a", long, "b"], 5) == [tokenizer(long)["input_ids"][:5]]
    with pytest.raises(ValueError, match="nothing to learn"):
        data.encode(tokenizer, ["a", "b"], 5)
    with pytest.raises(ValueError, match="there are no passages: there is nothing to learn"):
        data.encode(tokenizer, [], 5)
    for length in (1, 0, -1):
        with pytest.raises(ValueError, match=f"length = {length} leaves nothing to predict"):
            data.encode(tokenizer, [long], length)


# --- files in SQuAD's form -----------------------------------------------------------------------


def test_a_file_in_squads_form_packed_or_not(tmp_path):
    plain, packed = tmp_path / "squad [v1]*.json", tmp_path / "squad.json.gz"
    plain.write_text(json.dumps(SQUAD))
    packed.write_bytes(gzip.compress(json.dumps(SQUAD).encode()))
    assert data.contexts(plain) == data.contexts(str(packed)) == PASSAGES
    assert data.unique(PASSAGES) == PASSAGES[:3]
    SQUAD_2 = json.loads(json.dumps(SQUAD))  # has more entries in some places
    SQUAD_2["data"][0]["paragraphs"][0]["qas"][0]["is_impossible"] = False
    plain.write_text(json.dumps(SQUAD_2))
    assert data.contexts(plain) == PASSAGES


def test_nothing_old_is_read(tmp_path):
    """Of the same name, size and time of change, as a cache might have it."""
    file = tmp_path / "squad.json"
    for word in ("old", "new"):
        file.write_text(json.dumps({"data": [{"paragraphs": [{"context": word}]}]}))
        os.utime(file, (1, 1))
        assert data.contexts(file) == [word]


@pytest.mark.parametrize(
    "content, fault",
    [
        ("", "is empty"),
        ("One of the most famous people.", r"not JSON \(Expecting value: line 1 column 1"),
        ('{"data": [{"title":', r"not JSON \(Expecting value: line 1 column 20"),
        (b"\xff\xfe\x00\x01", "can't decode byte 0xff"),
        (b"\x1f\x8b\x00\x00", "ended before"),
        (gzip.compress(json.dumps(SQUAD).encode())[:-20], "ended before"),
        ("[1, 2]", 'has no "data"'),
        ('{"version": "1.1"}', 'has no "data"'),
        ('{"data": {"title": "Warsaw"}}', "data is not a list"),
        ('{"data": []}', "data is empty"),
        ('{"data": ["one", "two"]}', r'data\[0\] has no list of "paragraphs"'),
        (
            '{"data": [{"paragraphs": []}, {"title": "a"}]}',
            r'data\[1\] has no list of "paragraphs"',
        ),
        ('{"data": [{"paragraphs": []}]}', "no article has a paragraph"),
        (
            '{"data": [{"paragraphs": [{"context": "a"}, {"text": "b"}]}]}',
            r'the "context" of data\[0\].paragraphs\[1\] is missing, or not a string',
        ),
        ('{"data": [{"paragraphs": [{"context": 1}]}]}', r"data\[0\].paragraphs\[0\] is missing"),
        ('{"data": [{"paragraphs": [{"context": " "}]}]}', "no passage with text in it"),
    ],
)
@pytest.mark.parametrize("name", ["squad.json", "squad.json.gz"])
def test_what_is_not_in_squads_form_is_named_and_the_place(content, fault, name, tmp_path):
    content = content.encode() if isinstance(content, str) else content
    packed = name.endswith("gz") and content and content[0] not in (0x1F, 0xFF)
    (tmp_path / name).write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(ValueError, match=fault) as caught:
        data.contexts(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("packed", [False, True])
def test_files_of_text_and_of_json_lines(tmp_path, packed):
    """From Windows, too: a mark at the start, and its ends of lines."""
    text = "One\r\nof two.\r\n \r\n\r\n비가 온다.\r\n\r\n\r\nIt rains.\n"
    lines = [
        {"text": "One\nof two."},
        {"id": 1, "text": "비가 온다."},
        {"text": " "},
        {"text": "It.\u2028Is."},
    ]
    for name, content, passages in (
        ("a.txt", text, ["One\nof two.", "비가 온다.", "It rains."]),
        (
            "b [v1].jsonl",
            "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines),
            ["One\nof two.", "비가 온다.", "It.\u2028Is."],
        ),
    ):
        encoded = content.encode("utf-8-sig")
        file = tmp_path / (name + ".gz" * packed)
        file.write_bytes(gzip.compress(encoded) if packed else encoded)
        assert data.contexts(file) == passages


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.txt", b"\xb0\xa1", "is not text in UTF-8, with .*: 'utf-8' codec can't decode byte"),
        ("a.txt", b" \n\n \n", "has no passage with text in it"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text":', r"is not lines of JSON, .*: line 3 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n[1]', 'the "text" of line 2 is missing, or not a string'),
        ("a.jsonl", b'{"content": "a"}', 'the "text" of line 1 is missing, or not a string'),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1 contains half of a character"),
        ("a.jsonl.gz", b"\x1f\x8b\x08", "is not lines of JSON"),
    ],
)
def test_what_is_wrong_in_such_a_file_is_named(tmp_path, name, content, fault):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=fault) as caught:
        data.contexts(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json does not exist"):
        data.contexts(tmp_path / "nowhere.json")
    with pytest.raises(FileNotFoundError, match="is not a file"):
        data.contexts(tmp_path)


# --- the hub -------------------------------------------------------------------------------------


def test_squad_is_read_by_its_name(tmp_path, monkeypatch):
    """A folder of that name stands in for the hub: one row for each question, as SQuAD has it."""
    rows = {
        "id": ["1", "2", "3"],
        "title": ["Warsaw"] * 3,
        "context": ["a b", "a b", "c"],
        "question": ["?"] * 3,
        "answers": [{"text": ["a"], "answer_start": [0]}] * 3,
    }
    folder = tmp_path / "rajpurkar" / "squad"
    folder.mkdir(parents=True)
    datasets.Dataset.from_dict(rows).to_parquet(folder / "train-00000-of-00001.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert data.contexts("squad") == ["a b", "a b", "c"]


def test_a_models_tokenizer_comes_from_its_folder(tmp_path):
    own = data.tokenizer()
    own.pad_token = None  # GPT-2 has none
    own.save_pretrained(tmp_path)
    found = data.tokenizer(tmp_path)
    assert found("a few words") == own("a few words")
    assert found.pad_token_id == found.eos_token_id == 0


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1)).save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"no tokenizer of .*save_pretrained of the tokenizer"):
        data.tokenizer(tmp_path)


OFFLINE = """
import sys
from naranhi.data import corpus
for call in (lambda: corpus.contexts("squad"), lambda: corpus.tokenizer("gpt2")):
    try:
        call()
    except OSError as error:
        print(error)
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", ["told so", "nobody listens"])
def test_offline_one_error_says_what_to_do(how, tmp_path):
    """In another process, because the hub's client reads its settings when it is imported."""
    settings = {"HF_HOME": str(tmp_path / "empty"), "HF_HUB_OFFLINE": "1"}
    program = OFFLINE
    if how == "nobody listens":
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        settings.update(HF_ENDPOINT=f"http://127.0.0.1:{port}", HF_HUB_OFFLINE="0")
        # The client tries six times and waits 23 s in all. It waits in vain, so it need not wait.
        program = "import time; time.sleep = lambda seconds: None" + OFFLINE
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **settings},
    )
    assert run.stderr == ""
    squad, tokenizer = run.stdout.splitlines()
    assert squad.startswith("no SQuAD.")
    assert "--corpus train-v1.1.json" in squad
    assert "HF_HOME" in squad
    assert tokenizer.startswith("no tokenizer of 'gpt2'.")
    assert "hf download gpt2 --local-dir" in tokenizer
    assert all("(The cause: " in line for line in (squad, tokenizer))


def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path):
    own = data.tokenizer()
    own.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer can be made of the files of "):
        data.tokenizer(tmp_path)
    without = PreTrainedTokenizerFast(tokenizer_object=own.backend_tokenizer)
    without.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has neither a padding token nor an end-of-text token"):
        data.tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"data": [{"paragraphs": [{"context": "a\\ud800"}]}]}', "contains half of a character"),
        ("[" * 100_000, "it is not JSON"),
    ],
)
def test_a_corpus_that_json_takes_and_a_tokenizer_does_not(tmp_path, text, words):
    (tmp_path / "corpus.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        data.contexts(tmp_path / "corpus.json")


def test_the_ending_of_a_name_decides_in_any_case(tmp_path):
    (tmp_path / "A.TXT").write_text("One.\n\nTwo.")
    assert data.contexts(tmp_path / "A.TXT") == ["One.", "Two."]
    (tmp_path / "a.md").write_text("One.\n\nTwo.")
    with pytest.raises(ValueError, match=r"text is read from files named \.txt"):
        data.contexts(tmp_path / "a.md")
