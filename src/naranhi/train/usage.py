"""Errors that a user can correct, raised on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from naranhi import distributed
from naranhi.checkpoint import CheckpointError


class UsageError(Exception):
    """A user's error. `raise_on_all` joins the ranks' distinct messages, one per line."""


def naming(option: str, function: Callable[[], Any]) -> Any:
    """Return the result of `function()`, which uses files that an option names.

    Raises:
        UsageError: for an OSError or a CheckpointError, with the option's name.
    """
    try:
        return function()
    except (OSError, CheckpointError) as error:
        raise UsageError(f"{option}: {error}") from None


def raise_on_all(function: Callable[[], Any]) -> Any:
    """Return the result of `function()`; raise a user's error of any rank on every rank.

    Raises:
        UsageError: see `distributed.raise_on_all`; for UsageError, OSError and ValueError.
    """
    errors = UsageError, OSError, ValueError
    return distributed.raise_on_all(function, errors=errors, kind=UsageError)
