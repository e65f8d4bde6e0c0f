import re

import numpy as np
import pytest
import torch

from naranhi import show
from naranhi.show import _answer


@pytest.fixture
def shown(monkeypatch):
    """What was displayed: (data by MIME type, metadata), in order."""
    outputs = []
    monkeypatch.setattr(
        _answer,
        "display",
        lambda data, raw, metadata=None: outputs.append((data, metadata)),
    )
    return outputs


@pytest.mark.parametrize(
    "third", [1 / 3, torch.tensor(1 / 3, dtype=torch.float64), np.float64(1 / 3)]
)
def test_an_answer_keeps_its_digits_for_the_page_and_rounds_them_for_people(shown, third):
    show.answer("a-name", formula=4, measured=third)
    [(data, metadata)] = shown
    assert data["text/plain"] == "formula   4\nmeasured  0.333"
    assert re.findall(r'data-(\w+)="([^"]*)"', data["text/html"]) == [
        ("answer", "a-name"),
        ("formula", "4"),
        ("measured", repr(1 / 3)),
    ]
    assert metadata == {"naranhi": {"measured": True}}


def test_what_no_rank_has_measured_is_not_marked_as_a_measurement(shown):
    show.answer("a", formula=2.5)
    [(data, metadata)] = shown
    assert "measured" not in data["text/html"] + data["text/plain"] and metadata is None


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        (
            "A name",
            {"formula": 1},
            "'A name' cannot name a question; write words joined by hyphens",
        ),
        ("a-", {"formula": 1}, "cannot name a question"),
        ("a", {}, "a: an answer needs formula=, measured=, or both"),
        ("a", {"formula": float("nan")}, "formula=nan: an answer is a finite number"),
        ("a", {"measured": "3"}, "measured='3': an answer is a finite number"),
        ("a", {"measured": True}, "measured=True: an answer is a finite number"),
    ],
)
def test_an_answer_that_cannot_stand_on_an_axis_is_refused(shown, name, values, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        show.answer(name, **values)
    assert shown == []
