"""Who is at fault: a rank is named only where no other could be."""

from naranhi.world.errors import diagnose, interruption, unknown


def calling(*calls):
    """The outcomes of ranks that met with these calls, and found that they differ."""
    error = unknown("CollectiveMismatch", "")
    error["calls"] = dict(enumerate(calls))
    return {rank: {"error": error} for rank in range(len(calls))}


def test_one_rank_among_equal_ones_is_named():
    found = diagnose(calling("barrier", "gather", "gather", "gather"), {}, {}, 8.0, None)
    assert found.rank == 0
    assert str(found).startswith("rank 0 called a different collective from the rest:")


def test_among_more_than_two_calls_nobody_is_named():
    shapes = "all_reduce 1", "all_reduce 2", "all_reduce 3", "all_reduce 4"
    for calls in (shapes, ("barrier", "all_reduce", "gather", "gather"), ("barrier", "gather")):
        found = diagnose(calling(*calls), {}, {}, 8.0, None)
        assert found.rank is None
        assert str(found).startswith("the ranks called different collectives:")


def test_of_two_that_died_none_is_the_one():
    died = {1: "killed by SIGKILL", 2: "exit status 3"}
    found = diagnose({}, died, {}, 8.0, None)
    assert found.rank is None
    assert str(found) == "rank 1 died (killed by SIGKILL), rank 2 died (exit status 3)"
    assert diagnose({}, {2: "exit status 3"}, {}, 8.0, None).rank == 2


def test_an_interruption_says_what_had_been_raised():
    outcomes = {
        0: {"error": unknown("KeyboardInterrupt", "")},
        2: {"error": unknown("ZeroDivisionError", "division by zero")},
    }
    assert interruption(outcomes, {}, {}, None) == (
        "the cell was interrupted\n"
        "  rank 0 was stopped\n"
        "  rank 2 raised ZeroDivisionError: division by zero"
    )
