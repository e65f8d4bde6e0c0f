"""States from top to bottom: each once, with the events that change them; one way back."""

import pytest

from naranhi import show
from naranhi.show._states import draw_states

ROUND = [("forward", "B"), ("forward again", "B"), ("backward", "C"), ("step()", "A")]


def texts(fig):
    return {text.get_text(): text.get_position() for text in fig.axes[0].texts if text.get_text()}


def test_states_stand_below_one_another_and_events_beside_their_arrows():
    found = texts(draw_states("A", ROUND))
    assert (
        found["A"][1] < found["forward"][1] < found["B"][1] < found["backward"][1] < found["C"][1]
    )
    assert found["forward again"][1] == found["B"][1], "it changes nothing"
    assert found["step()"][0] < found["A"][0], "the way back is on the left"
    assert found["A"][1] < found["step()"][1] < found["C"][1]


def test_a_way_back_to_the_middle_is_refused():
    with pytest.raises(ValueError, match="'undo' leads back to B"):
        show.states("A", [("go", "B"), ("go on", "C"), ("undo", "B")], "A way back.")


def test_several_events_that_change_nothing_stand_below_one_another():
    twice = [("forward", "A"), ("forward again", "A"), *ROUND]
    assert "forward\nforward again" in texts(draw_states("A", twice))


def test_a_second_round_is_refused():
    for place in "BC":
        with pytest.raises(ValueError, match="'go again' comes after the way back to A"):
            show.states("A", [("go", "B"), ("back", "A"), ("go again", place)], "Two rounds.")


def test_it_is_shown_with_its_sentence(capsys):
    show.states("A", ROUND, "Three states, and what leads from one to the next.")
    assert "[figure: Three states" in capsys.readouterr().out
