"""What the live pages ask of the package: a request in, an answer out, both JSON.

In the page it runs on Pyodide, beside `naranhi.schedules`, `costs` and `planning` as they are; the
tests and the build call it natively. It parses what a reader typed, calls the package, and returns
what a script only has to draw. It computes nothing that the package computes.
"""

import json
from importlib import import_module
from types import ModuleType
from typing import Any

from lab.fields import InputError, parse

KINDS = ("schedule", "puzzle", "trace", "collectives", "activations", "zero", "planning")


def answer(request: str) -> str:
    """Return the answer to {"lab": kind, "values": {name: text}} as JSON.

    It is what the kind's `run` returns, or {"error": ...}: with "text", an error of the package in
    its own words, or with "code" and "values", one of the lab's own, which the page has words for.
    """
    asked = json.loads(request)
    try:
        return json.dumps(respond(asked["lab"], asked["values"]), allow_nan=False)
    except InputError as error:
        return json.dumps({"error": {"code": error.code, "values": error.values}})
    except (ValueError, TypeError) as error:
        return json.dumps({"error": {"text": str(error), **_place(error)}})


def respond(kind: str, values: dict[str, str]) -> dict[str, Any]:
    """Return the answer for what a reader typed, by name; what is left out is as it is by default.

    Raises:
        InputError: a field is not what it has to be.
        ValueError: what the package raises.
    """
    lab = module(kind)
    return lab.run(**parse(lab.FIELDS, values))


def describe(kind: str) -> str:
    """Return the fields of a kind as JSON, in their order."""
    return json.dumps([field._asdict() for field in module(kind).FIELDS])


def module(kind: str) -> ModuleType:
    """Return the module of a kind, imported when it is first asked for: a reader waits for it."""
    if kind not in KINDS:
        raise ValueError(f"there is no lab of the kind {kind!r}; these are {', '.join(KINDS)}")
    return import_module(f"lab.{kind}")


def _place(error):
    """Return the rank and the action that an error of a schedule names."""
    found = {name: getattr(error, name, None) for name in ("rank", "action")}
    return {name: str(value) for name, value in found.items() if value is not None}
