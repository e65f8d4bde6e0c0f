"""Turn the errors of all ranks into one sentence: which rank failed, and why."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from naranhi.world.places import place

CONSEQUENCE = re.compile(
    r"closed by peer|reset by peer|[Bb]roken pipe|Socket closed|connection abort"
    r"|endpoint is not connected|[Aa]borted|not connected to peer|Bad file descriptor"
)
DEADLINE = re.compile(r"[Tt]imed out|[Tt]imeout|wait timeout")
GLOO = re.compile(r"^\[[^\]]*\.(cc|cpp|h):\d+\]|^Application timeout caused pair closure")
DISTRIBUTED = (
    "RuntimeError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "LostRankError",  # of a checkpoint
)


class _Readable:
    """An exception that a notebook shows as its message alone, without our frames."""

    def _render_traceback_(self):
        return [f"{type(self).__name__}: {self}"]


class RankError(_Readable, RuntimeError):
    """Something failed on the ranks.

    The message names the rank and the cause first, then how it affected the other ranks. `rank` and
    `errors` are also attributes.

    Args:
        message: the text for the user.
        rank: the rank at fault, or None if no single rank is.
        errors: for each rank that failed, its error's type name and message.
    """

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        errors: dict[int, tuple[str, str]] | None = None,
    ):
        super().__init__(message)
        self.rank = rank
        self.errors: dict[int, tuple[str, str]] = errors or {}


class RankInterrupt(_Readable, KeyboardInterrupt):
    """The user interrupted a cell that was running on the ranks."""


# The state of a rank that was not waiting when others had failed.
BUSY = "still busy"
FROZEN = "frozen (its process is stopped)"
DEAF = "busy outside of Python (it holds the interpreter's lock and answers nobody)"
UNREACHABLE = "out of reach (its host or the link to it is gone, or its process is stopped)"


def unknown(name: str, message: str) -> dict[str, Any]:
    """Describe an error (see `outcome`) of which only the type name and the message are known."""
    return {
        "type": name,
        "message": message,
        "frames": [],
        "syntax": None,
        "calls": None,
        "absent": None,
    }


def named(ranks: Iterable[int]) -> str:
    """Write rank numbers as text: `[0, 1, 2, 5]` as `ranks 0-2, 5`; `[3]` as `rank 3`."""
    ranks = sorted(ranks)
    runs = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def kind(error: dict[str, Any]) -> str:
    """Classify an error: 'consequence', 'deadline', 'mismatch' or 'cause'."""
    if error["type"] in ("KeyboardInterrupt", "Severed"):
        return "consequence"  # only the notebook causes these
    if error["calls"] is not None:
        return "mismatch"
    if error["absent"] is not None:
        return "deadline"
    if _of_messages(error) and CONSEQUENCE.search(error["message"]):
        return "consequence"
    if _of_messages(error) and DEADLINE.search(error["message"]):
        return "deadline"
    return "cause"


def _of_messages(error):
    """Return whether messages between ranks failed, and not, say, a cell's database connection."""
    if error["type"] != "RuntimeError" or not error["frames"] or GLOO.match(error["message"]):
        return error["type"] in DISTRIBUTED
    return re.search("torch/distributed/|naranhi/collectives/", error["frames"][-1][0]) is not None


def diagnose(
    outcomes: dict[int, dict[str, Any]],
    died: dict[int, str],
    stuck: dict[int, str],
    timeout: float,
    cell: list[tuple[int, str]] | None,
) -> RankError:
    """Return the RankError that describes what happened to the ranks.

    Args:
        outcomes: rank -> outcome (see `outcome`), for the ranks that answered.
        died: rank -> how it ended, for the ranks whose process is gone.
        stuck: rank -> what it was doing, for ranks that were not waiting when others had failed.
        timeout: the deadline of a collective, in seconds.
        cell: the cell's lines (see `places.numbered`), or None for a function.
    """
    errors = {r: o["error"] for r, o in outcomes.items() if o["error"]}
    kinds = {r: kind(e) for r, e in errors.items()}
    of = {k: sorted(r for r in errors if kinds[r] == k) for k in set(kinds.values())}
    where = {r: place(e, cell) for r, e in errors.items()}
    head, culprit, mentioned = _cause(errors, of, where, died, stuck, timeout, outcomes)
    rest = {}
    for rank in sorted(set(errors) - set(mentioned)):
        text = f"{_suffered(errors[rank], kinds[rank])}{where[rank]}"
        rest.setdefault(text, []).append(rank)
    if rest:
        head += "\nAs a consequence:" + "".join(
            f"\n  {named(ranks)} {text}" for text, ranks in rest.items()
        )
    summary = {r: (e["type"], e["message"]) for r, e in errors.items()}
    return RankError(head, culprit, summary)


def _cause(errors, of, where, died, stuck, timeout, outcomes):
    """Return the first sentence, the single rank at fault or None, and the ranks it mentions."""
    if died:
        parts = [f"rank {r} died ({how})" for r, how in sorted(died.items())]
        return ", ".join(parts), min(died) if len(died) == 1 else None, []
    if "cause" in of:
        ranks = of["cause"]
        first = errors[ranks[0]]
        same = [r for r in ranks if _same(errors[r], first) and where[r] == where[ranks[0]]]
        text = f"{named(same)} raised {first['type']}: {first['message']}{where[ranks[0]]}"
        others = [r for r in ranks if r not in same]
        for r in others:
            text += f"\nand rank {r} raised {errors[r]['type']}: {errors[r]['message']}{where[r]}"
        return text, ranks[0] if len(ranks) == 1 else None, ranks
    if "mismatch" in of:
        return _mismatch(max((errors[r]["calls"] for r in of["mismatch"]), key=len), where)
    if stuck and "deadline" not in of:
        ranks = sorted(r for r, state in stuck.items() if state != BUSY) or sorted(stuck)
        states = dict.fromkeys(stuck[r] for r in ranks)
        text = f"{named(ranks)} {_were(ranks)} {', '.join(states)} for {timeout:g} s"
        return text, ranks[0] if len(ranks) == 1 else None, []
    if "deadline" in of:
        return _late(errors, of, where, stuck, timeout, outcomes)
    ranks = sorted(errors)
    first = errors[ranks[0]]
    return f"{named(ranks)} lost a connection: {_first_line(first)}{where[ranks[0]]}", None, ranks


def _late(errors, of, where, stuck, timeout, outcomes):
    """Describe which ranks were waited for.

    A rank that waits for a plain message cannot name its peer, so then no rank that has ended is
    blamed.
    """
    waiting = of["deadline"]
    # The first rank to time out breaks the connections of those about to time out.
    alike = sorted({*waiting, *of.get("consequence", ())})
    done = [r for r, o in outcomes.items() if not o["error"]]
    missed = {r for rank in waiting for r in errors[rank]["absent"] or ()} - set(waiting)
    unable = {r for r, state in stuck.items() if state != BUSY}
    absent = sorted(missed or unable or set(done) | set(stuck))
    within = f"within {timeout:g} s"
    if not absent:
        text = f"every rank waited for another and none could go on {within}:"
        return text + "".join(f"\n  rank {r}{where[r]}" for r in alike), None, alike
    by_state = {}
    for rank in sorted(absent, key=lambda r: r not in stuck):
        by_state.setdefault(stuck.get(rank, "at the end of the cell"), []).append(rank)
    states = [(ranks, f"{state}{where.get(ranks[0], '')}") for state, ranks in by_state.items()]
    culprit = absent[0] if len(absent) == 1 else None
    busy = [r for r in absent if r in stuck]
    if missed:
        parts = [f"{named(ranks)} did not take part {within}: {state}" for ranks, state in states]
        return "; ".join(parts), culprit, busy
    waited = [r for r in alike if r not in stuck]
    same = [r for r in waited if where[r] == where[waited[0]]]
    text = f"{named(same)} waited in vain for a message {within}{where[waited[0]]}"
    for ranks, state in states:
        text += f"\nmeanwhile {named(ranks)} {_were(ranks)} {state}"
    return text, culprit if culprit in stuck else None, [*busy, *same]


def _were(ranks):
    return "was" if len(ranks) == 1 else "were"


def _mismatch(calls, where):
    """Describe which ranks called what; a rank that differs from all others comes first."""
    groups = {}
    for rank, call in sorted(calls.items()):
        groups.setdefault(call, []).append(rank)
    ordered = sorted(groups.items(), key=lambda item: (len(item[1]), item[1]))
    # Of two ranks, or among three calls or more, none is the odd one.
    odd = len(ordered) == 2 and len(ordered[0][1]) == 1 and len(calls) > 2
    alone = ordered[0][1][0] if odd else None
    text = "the ranks called different collectives:" + "".join(
        f"\n  {named(group)} called {call}{where.get(group[0], '')}" for call, group in ordered
    )
    if alone is not None:
        text = f"rank {alone} called a different collective from the rest:" + text.split(":", 1)[1]
    return text, alone, list(calls)


def interruption(
    outcomes: dict[int, dict[str, Any]],
    died: dict[int, str],
    stuck: dict[int, str],
    cell: list[tuple[int, str]] | None,
) -> str:
    """Return the message for a user who interrupted a cell; arguments as for `diagnose`."""
    text = "the cell was interrupted"
    for rank, outcome in sorted(outcomes.items()):
        error = outcome["error"]
        if error:
            raised = f"raised {error['type']}: {error['message']}"
            what = raised if kind(error) == "cause" else "was stopped"
            text += f"\n  rank {rank} {what}{place(error, cell)}"
    for rank in sorted({*died, *stuck} - set(outcomes)):
        state = f" ({stuck[rank]})" if stuck.get(rank, BUSY) != BUSY else ""
        text += f"\n  rank {rank} did not stop{state} and was ended"
    return text


def _same(a, b):
    return (a["type"], a["message"]) == (b["type"], b["message"])


def _first_line(error):
    text = error["message"].strip() or error["type"]
    # gloo begins with its own source file in brackets, ends with advice, and names ports.
    text = re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\]\s*", "", text.splitlines()[0])
    return re.sub(r"\s*\[[0-9a-fA-F.:%\w]*\]:?\d*", "", text).split(". ")[0].strip(" .")


def _suffered(error, kind_):
    if error["type"] == "KeyboardInterrupt":
        return "was stopped"
    if kind_ == "deadline" or error["type"] == "Severed":
        return "waited in vain"
    return f"lost its connection ({_first_line(error).lower()})"
