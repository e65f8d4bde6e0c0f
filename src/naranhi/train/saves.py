"""The checkpoints of a training: `--save`, `--save-every`, `--keep` and `--resume`."""

from __future__ import annotations

import argparse
from typing import Any, Self

import torch

from naranhi.checkpoint import CheckpointError, Checkpoints
from naranhi.distributed import from_all_ranks
from naranhi.pipeline import Pipeline
from naranhi.train.build import default_top_k
from naranhi.train.usage import UsageError, raise_on_all

# The options that have to be as they were, when a run goes on.
RESUMED = "batch", "seed", "clip", "dropout", "untied", "experts", "top_k"
MODEL = "model"  # what its weights do not show, in `settings`


class Saves:
    """Save a training after every so many steps, in the background; without `--save`, do nothing.

    Args:
        options: as `naranhi.train.parse` returns them.
        settings: {option: value} of what a run that is resumed must have as it was.

    Raises:
        UsageError: on every rank: another run saves into the folder, or it has checkpoints and this
            run is not to resume them.
    """

    folder: str | None
    every: int
    settings: dict[str, Any]
    start: int
    about: str | None

    def __init__(self, options: argparse.Namespace, settings: dict[str, Any]) -> None:
        self.folder, self.every, self.settings = options.save, options.save_every, settings
        self.start, self.about, self._checkpoints, self._steps = 0, None, None, []
        self._begun = None
        if self.folder is not None:
            self._checkpoints = raise_on_all(lambda: Checkpoints(self.folder, options.keep))
            self._or_close(lambda: self._begin(options.resume))

    def _begin(self, resume):
        self._checkpoints.claim()
        # Those of rank 0: a network file system may show the ranks different ones.
        own = raise_on_all(self._checkpoints.steps)
        self._steps = from_all_ranks(own, self._checkpoints.group)[0]
        if self._steps and not resume:
            raise UsageError(
                f"--save {self.folder} has checkpoints of a run already, up to step "
                f"{self._steps[-1]}: --resume goes on with that run, and another folder begins a "
                "new one"
            )
        if resume and not self._steps:
            self.about = f"nothing in {self.folder} to resume: from the beginning"

    def _or_close(self, function):
        """Return what `function()` returns, or raise UsageError on every rank, and close."""
        try:
            return raise_on_all(function)
        except UsageError:
            self._checkpoints.close()
            raise

    def resume(self, pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
        """Load the newest checkpoint, if there is one.

        Args:
            pipeline: this rank's part of the model.
            optimizer: its optimizer.

        Raises:
            UsageError: on every rank: the checkpoints are damaged, or of another model, or of a run
                with other settings.
        """
        if self._steps:
            self._or_close(lambda: self._load(pipeline, optimizer))

    def _load(self, pipeline, optimizer):
        saved = self._checkpoints.load(pipeline, optimizer)
        if not isinstance(settings := saved.state.get("settings"), dict):
            raise UsageError(
                f"step {saved.step} in {self.folder} was not saved by naranhi.train: resume it "
                "with the program that saved it, or begin a run in another folder"
            )
        settings = {MODEL: self.settings.get(MODEL)} | settings  # older runs did not note it
        for name, own in self.settings.items():
            was = settings.get(name)
            if name == "--top-k" and was is None and settings.get("--experts"):
                was = default_top_k(settings["--experts"])  # as older runs noted it
            if was != own:
                raise UsageError(
                    f"{self.folder} was saved with another {name} ({was}, now {own}): resume with "
                    "what the run began with, or begin another run in another folder"
                )
        self.start = saved.step
        self.about = f"resumed from step {saved.step} in {self.folder}" + "".join(
            f"; skipped step {step}: {why}" for step, why in saved.skipped.items()
        )

    def after(
        self, steps: int, last: bool, pipeline: Pipeline, optimizer: torch.optim.Optimizer
    ) -> None:
        """Save, if it is time to.

        Args:
            steps: how many steps are done.
            last: whether no step follows.
            pipeline: this rank's part of the model.
            optimizer: its optimizer.

        Raises:
            UsageError: on every rank, if this save, or the one before, has failed.
        """
        if self._checkpoints is not None and (steps % self.every == 0 or last):
            failing = self._begun  # until it is known how that save, in the background, has ended
            try:
                self._checkpoints.wait()
                failing = self._begun = steps
                self._checkpoints.save_async(steps, pipeline, optimizer, settings=self.settings)
            except CheckpointError as error:
                raise UsageError(f"step {failing} is not saved: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Wait for the save in the background."""
        if self._checkpoints is not None:
            try:
                self._checkpoints.__exit__(kind, error, traceback)
            except CheckpointError as failed:
                raise UsageError(f"step {self._begun} is not saved: {failed}") from None
