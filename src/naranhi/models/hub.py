"""Fetching from the Hugging Face hub, with one error that says what to do if that fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


def offline(name: str) -> str:
    """Return what to do if the model of that name cannot be fetched: a sentence or two."""
    return (
        "Not a local folder, not cached, and the hub is unreachable. Where there is a connection, "
        f"run `hf download {name} --local-dir FOLDER`; then copy the folder here and give its path "
        "instead of the name."
    )


@contextmanager
def fetching(what: str, advice: str) -> Iterator[None]:
    """Wrap a call that may ask the hub, quietly.

    Args:
        what: what the call fetches, for the error.
        advice: what to do if it fails, in whole sentences.

    Raises:
        OSError: for any OSError inside, such as an unreachable hub. The message says what is
            missing, then the advice, then the cause in one line.
    """
    try:
        with quiet():
            yield
    except OSError as error:
        cause = str(error).strip().partition("\n")[0]
        raise OSError(f"no {what}. {advice} (The cause: {cause})") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the hub's libraries quiet: no progress bars, no warnings about each attempt."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging as transformers_logging

    talkative = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    levels = [logger.level for logger in talkative]
    hub_bars = not are_progress_bars_disabled()
    transformers_bars = transformers_logging.is_progress_bar_enabled()
    for logger in talkative:
        logger.setLevel(logging.ERROR)
    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        for logger, level in zip(talkative, levels, strict=True):
            logger.setLevel(level)
        if hub_bars:
            enable_progress_bars()
        if transformers_bars:
            transformers_logging.enable_progress_bar()
