"""The checkpoints of a training: `--save`, `--save-every`, `--keep` and `--resume`."""

from __future__ import annotations

import argparse
from typing import Any, Self

import torch
from torch.nn.utils import get_total_norm

from naranhi.checkpoint import CheckpointError, Checkpoints
from naranhi.checkpoint.ranks import LostRankError
from naranhi.checkpoint.storage import OtherModelError
from naranhi.pipeline import Pipeline
from naranhi.train.build import default_top_k
from naranhi.train.usage import UsageError, naming, raise_on_all

# The options that must not change when a run is resumed.
RESUMED = "batch", "seed", "clip", "dropout", "untied", "bf16", "experts", "top_k"
MODEL = "model"  # in `settings`: how it computes, which weights do not show
PADDING = "padding token"  # in `settings`, with experts


class Saves:
    """Save a training after every so many steps, in the background; without `--save`, do nothing.

    Args:
        options: as `naranhi.train.parse` returns them.
        settings: {option: value} of everything that a resumed run must not change.

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
            self._or_close(lambda: naming("--save", lambda: self._begin(options.resume)))

    def _begin(self, resume):
        self._checkpoints.claim()
        self._steps = self._checkpoints.steps()
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
        try:
            saved = self._checkpoints.load(pipeline, optimizer)
        except OtherModelError as error:
            raise UsageError(
                f"{self.folder} was saved by a run of another model: resume with the options that "
                "it began with (--model, --config, --experts, --untied), or begin another run in "
                f"another folder; {error}"
            ) from None
        if not isinstance(settings := saved.state.get("settings"), dict):
            raise UsageError(
                f"step {saved.step} in {self.folder} was not saved by naranhi.train: resume it "
                "with the program that saved it, or begin a run in another folder"
            )
        # Settings that older runs did not save.
        unnoted = {name: self.settings.get(name) for name in (MODEL, PADDING)} | {"--bf16": False}
        settings = unnoted | settings
        for name, own in self.settings.items():
            was = settings.get(name)
            if name == "--top-k" and was is None and settings.get("--experts"):
                was = default_top_k(settings["--experts"])  # as older runs saved it
            if was != own:
                raise UsageError(
                    f"{self.folder} was saved with another {name} ({was}, now {own}): resume with "
                    "what the run began with, or begin another run in another folder"
                )
        self.start = saved.step
        self.about = f"resumed from step {saved.step} in {self.folder}" + "".join(
            f"; skipped step {step}: {why}" for step, why in saved.skipped.items()
        )

    def advice(self) -> str:
        """Return advice, as text, for a run whose loss, gradients or state are not finite."""
        if not self.start and self._begun is None:
            return "a lower --lr may help"
        return (
            f"begin another run, with a lower --lr and another --save, because {self.folder} keeps "
            "its --lr; or, if a rank computes wrong, delete the newest checkpoints and --resume "
            "from an earlier one on other hardware"
        )

    def after(
        self, steps: int, last: bool, pipeline: Pipeline, optimizer: torch.optim.Optimizer
    ) -> None:
        """Save, if a checkpoint is due after this step.

        Args:
            steps: how many steps are done.
            last: whether no step follows.
            pipeline: this rank's part of the model.
            optimizer: its optimizer.

        Raises:
            UsageError: on every rank: this save, or the one before, has failed; or what would be
                saved is not finite.
            LostRankError: a rank was lost.
        """
        if self._checkpoints is not None and (steps % self.every == 0 or last):
            failing = self._begun  # until wait() returns, an error is the earlier save's
            try:
                self._checkpoints.wait()
                failing = steps
                raise_on_all(lambda: self._require_finite(steps, optimizer))
                self._begun = steps
                self._checkpoints.save_async(steps, pipeline, optimizer, settings=self.settings)
            except LostRankError:  # only this rank may know it: it cannot be raised on all
                raise
            except CheckpointError as error:
                raise UsageError(f"step {failing} is not saved: {error}") from None

    def _require_finite(self, steps, optimizer):
        """Raise UsageError if a finite loss was followed by an update that is not finite."""
        kept = [value for values in optimizer.state.values() for value in values.values()]
        updated = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        tensors = [tensor for tensor in (*updated, *kept) if torch.is_tensor(tensor)]
        tensors = [tensor for tensor in tensors if tensor.numel()]  # a shard may have no elements
        with torch.no_grad():
            largest = get_total_norm(tensors, norm_type=torch.inf)
        if not largest.isfinite():
            raise UsageError(
                f"step {steps} is not saved: its update left infinities or NaN in parameters or "
                f"in the state of the optimizer: {self.advice()}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Wait for the save in the background."""
        if self._checkpoints is not None:
            try:
                self._checkpoints.__exit__(kind, error, traceback)
            except LostRankError:
                raise
            except CheckpointError as failed:
                raise UsageError(f"step {self._begun} is not saved: {failed}") from None
