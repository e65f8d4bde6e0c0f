"""The catalogues of the live pages: both languages have words for all that can be said."""

import json
import re
from pathlib import Path

import lab
import pytest
import yaml
from languages import LANGUAGES

from naranhi.show._colors import KINDS

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = [*(REPOSITORY / "book/_static/lab").glob("*.js")]
CATALOGUES = {
    language.code: yaml.safe_load((REPOSITORY / f"book/{language.code}/lab.yml").read_text())
    for language in LANGUAGES
}
DEFAULTS = {"trace": {"file": "0F0,0B0\n1F0,1B0"}}


def places(catalogue):
    """Each key, and the places that its text has."""
    return {
        (group, key): sorted(re.findall(r"\{(\w+)\}", text))
        for group, texts in catalogue.items()
        for key, text in (texts.items() if isinstance(texts, dict) else [("", texts)])
    }


def test_both_languages_have_the_same_keys_and_places():
    english, *others = map(places, CATALOGUES.values())
    assert others and all(other == english for other in others)


@pytest.mark.parametrize("language", CATALOGUES)
def test_every_field_choice_result_and_column_has_words(language):
    words = CATALOGUES[language]
    for kind in lab.KINDS:
        for field in lab.module(kind).FIELDS:
            assert field.kind == "file" or field.name == "file_name" or words["fields"][field.name]
        values = DEFAULTS.get(kind, {})
        answer = json.loads(lab.answer(json.dumps({"lab": kind, "values": values})))
        assert set(answer.get("outputs", {})) <= set(words["outputs"]), kind
        columns = answer.get("table", {}).get("columns", [])
        assert {name for name, _ in columns} <= set(words["columns"]), kind
    assert set(words["kinds"]) == set(KINDS)
    if language == "en":
        assert words["kinds"] == {kind: word for kind, (word, _) in KINDS.items()}


def test_every_error_of_the_labs_own_has_words():
    sources = [*(REPOSITORY / "book/_lab/lab").glob("*.py"), *SCRIPTS]
    text = "\n".join(path.read_text() for path in sources)
    raised = set(re.findall(r'InputError\(\s*"(\w+)"', text))
    raised |= set(re.findall(r'(?:failed\(catalogue, |refuse\(|code: )"(\w+)"', text))
    assert len(raised) > 8
    assert raised | {"failed"} == set(CATALOGUES["en"]["errors"])


def test_no_word_is_left_over():
    sources = [
        *SCRIPTS,
        REPOSITORY / "book/_lab/lab/trace.py",
        REPOSITORY / "book/_ext/naranhi_lab.py",
    ]
    text = "\n".join(path.read_text() for path in sources)
    for key in CATALOGUES["en"]["texts"]:
        assert re.search(rf"\b{key}\b", text), key
