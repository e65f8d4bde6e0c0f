"""What all ranks together save: tensors, which rank has which boxes, other optimizer state.

All ranks exchange what they have. Each then finds the same faults, or the same plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from naranhi.checkpoint import rest
from naranhi.checkpoint.boxes import Box, tiling_fault, writers
from naranhi.checkpoint.storage import CheckpointError, OtherModelError


class RankState(NamedTuple):
    """A summary of one rank's state, which it sends to the others.

    Args:
        tensors: {name: (shape, dtype, boxes)} of all tensors: names that begin with "parameters."
            or "buffers." are the model's; "optimizer." marks what is kept for each element.
        scalars: {parameter: {key: value}}: what the optimizer keeps for a parameter as a whole.
        group_of: {parameter: the number of its parameter group}.
        optimizers: (kind, options of each parameter group) of each optimizer.
        extra: {module: (digest, value)} of what `get_extra_state` of modules has returned.
    """

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, tuple[Box, ...]]]
    scalars: dict[str, dict[str, Any]]
    group_of: dict[str, int]
    optimizers: list[tuple[str, list[dict[str, Any]]]]
    extra: dict[str, tuple[str, Any]]

    @property
    def digest(self) -> str:
        """Return a digest of which elements of the model this rank has, whatever their values."""
        elements = {
            name: boxes
            for name, (_, _, boxes) in self.tensors.items()
            if not name.startswith("optimizer.")  # a new optimizer has no state yet
        }
        return hashlib.sha256(repr(sorted(elements.items())).encode()).hexdigest()


class Layout(NamedTuple):
    """What all ranks together have; every rank computes the same layout.

    Args:
        tensors: {name: (shape, dtype)}.
        scalars, group_of: as in `RankState`, of the whole model.
        kind: the optimizer's class; None without one.
        options: the options of each parameter group.
        writes: {(name, box): the rank that writes it}.
        digests: which elements each rank has (`RankState.digest`).
        extra: {module: what its `get_extra_state` has returned}.
    """

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    scalars: dict[str, dict[str, Any]]
    group_of: dict[str, int]
    kind: str | None
    options: list[dict[str, Any]]
    writes: dict[tuple[str, Box], int]
    digests: list[str]
    extra: dict[str, Any] = {}  # noqa: RUF012  (checkpoints without it have none)

    def not_sharded(self) -> dict[str, Any]:
        """Return the fields that a checkpoint stores besides the tensors."""
        fields = "scalars", "group_of", "kind", "options", "digests", "extra"
        return {name: getattr(self, name) for name in fields}

    @classmethod
    def of(
        cls, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]], content: Mapping[str, Any]
    ) -> Layout:
        """Return the layout that was saved: its tensors, and what `not_sharded` has returned."""
        fields = {name: content[name] for name in cls._fields if name in content}
        return cls(tensors=tensors, writes={}, **fields)


def merge(states: Sequence[RankState]) -> Layout:
    """Return the layout of all ranks' states.

    Args:
        states: the state of each rank, by rank.

    Raises:
        CheckpointError: ranks differ in what should be the same on them, or the boxes of a tensor
            do not cover it exactly once.
    """
    tensors, owners, first = {}, {}, {}
    for rank, state in enumerate(states):
        for name, (shape, dtype, boxes) in state.tensors.items():
            known = tensors.setdefault(name, (shape, dtype))
            if known != (shape, dtype):
                raise CheckpointError(
                    f"{name} has {_describe(known)} on rank {first[name]}, "
                    f"{_describe((shape, dtype))} on rank {rank}: give all ranks the same model"
                )
            first.setdefault(name, rank)
            owners.setdefault(name, {})
            for box in boxes:
                owners[name].setdefault(box, []).append(rank)
    for name, (shape, _) in tensors.items():
        if fault := tiling_fault(shape, owners[name]):
            raise CheckpointError(
                f"the ranks' shards of {name}, of shape {list(shape)}, do not make up the whole: "
                f"{fault}; every rank with a part of the model must call this, with the same model"
            )
    optimizers = [
        (rank, optimizer) for rank, state in enumerate(states) for optimizer in state.optimizers
    ]
    for rank, optimizer in optimizers:
        if not rest.same(optimizer, optimizers[0][1]):
            raise CheckpointError(
                f"the optimizer of rank {optimizers[0][0]} is {_text(optimizers[0][1])}, that of "
                f"rank {rank} is {_text(optimizer)}: give all ranks the same"
            )
    kind, options = optimizers[0][1] if optimizers else (None, [])
    return Layout(
        tensors,
        _same("state of the optimizer for", [state.scalars for state in states]),
        _same("parameter group of", [state.group_of for state in states]),
        kind,
        options,
        writers(owners, {name: dtype.itemsize for name, (_, dtype) in tensors.items()}),
        [state.digest for state in states],
        _same_extra([state.extra for state in states]),
    )


def compare(saved: Layout, own: Layout, with_optimizer: bool, strict: bool = True) -> None:
    """Raise OtherModelError, naming the first difference, unless both are of the same model.

    Args:
        saved: the layout of the checkpoint.
        own: the layout of the model to load into, and of its optimizer.
        with_optimizer: whether to compare the optimizers, too.
        strict: whether both must have the same tensors and extra states; otherwise at least one
            tensor in common, and equal shapes and dtypes of the common ones.
    """
    if not strict and not any(name in own.tensors for name in saved.tensors):
        raise OtherModelError("the checkpoint and the model have no parameter of the same name")
    for name in dict.fromkeys((*saved.tensors, *own.tensors)):
        kind, _, own_name = name.partition(".")
        if kind == "optimizer":  # an optimizer may have no state before its first step
            continue
        what = f"{kind.removesuffix('s')} {own_name}"
        if name not in saved.tensors or name not in own.tensors:
            if not strict:
                continue
            here, there = ("model", own) if name in saved.tensors else ("checkpoint", saved)
            first = next((n for n in there.tensors if n.startswith(f"{kind}.")), None)
            example = f" (its first is {first.partition('.')[2]})" if first else ""
            raise OtherModelError(
                f"the {here} has no {what}{example}: load into the model that was saved, or with "
                "strict=False what both have"
            )
        if saved.tensors[name] != own.tensors[name]:
            raise OtherModelError(
                f"{what} has {_describe(saved.tensors[name])} in the checkpoint, and "
                f"{_describe(own.tensors[name])} in the model"
            )
    for name in dict.fromkeys((*saved.extra, *own.extra)) if strict else ():
        if name not in saved.extra or name not in own.extra:
            raise OtherModelError(
                f"the {'model' if name in saved.extra else 'checkpoint'} has no extra state of "
                f"{name or 'the model'}: load into the model that was saved"
            )
    if not with_optimizer:
        return
    kinds = [
        f"{kind} with {len(options)} parameter group{'s' * (len(options) != 1)}"
        if kind
        else "no optimizer"
        for kind, options in ((saved.kind, saved.options), (own.kind, own.options))
    ]
    if kinds[0] != kinds[1]:
        raise OtherModelError(
            f"the checkpoint was saved with {kinds[0]}, and load was given {kinds[1]}; without an "
            "optimizer, load reads the model alone"
        )
    for name in dict.fromkeys((*saved.group_of, *own.group_of)):
        groups = [layout.group_of.get(name, "none") for layout in (saved, own)]
        if groups[0] != groups[1]:
            raise OtherModelError(
                f"parameter {name} is in parameter group {groups[0]} in the checkpoint, and in "
                f"{groups[1]} in the optimizer"
            )


def names(layout: Layout) -> list[str]:
    """Return the names of a layout's parameters and buffers, and of modules with extra state."""
    tensors = (name.partition(".") for name in layout.tensors)
    return [*(name for kind, _, name in tensors if kind != "optimizer"), *layout.extra]


def as_json(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, list[Any]]:
    """Return {name: [shape, name of the dtype]} of {name: (shape, dtype)}."""
    return {name: [list(shape), _name(dtype)] for name, (shape, dtype) in tensors.items()}


def from_json(
    tensors: Mapping[str, list[Any]],
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the argument of `as_json` from its result."""
    return {name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in tensors.items()}


def _describe(tensor):
    shape, dtype = tensor
    return f"shape {list(shape)} and dtype {_name(dtype)}"


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _same(what, of_ranks):
    """Return the union of the ranks' dicts; raise CheckpointError where two differ."""
    union = {}
    for rank, values in enumerate(of_ranks):
        for name, value in values.items():
            if not rest.same(union.setdefault(name, value), value):
                raise CheckpointError(
                    f"the {what} {name} is {union[name]} on one rank, {value} on rank {rank}: "
                    "the ranks have not taken the same steps"
                )
    return union


def _same_extra(of_ranks):
    """Return the union of the ranks' extra states, which are compared by their digests."""
    union, owner = {}, {}
    for rank, extra in enumerate(of_ranks):
        for name, (digest, value) in extra.items():
            if union.setdefault(name, (digest, value))[0] != digest:
                raise CheckpointError(
                    f"the extra state of {name or 'the model'} is not the same on rank "
                    f"{owner[name]} and rank {rank}: only what is equal on all ranks that have the "
                    "module can be saved"
                )
            owner.setdefault(name, rank)
    return {name: value for name, (_, value) in union.items()}


def _text(optimizer):
    kind, options = optimizer
    return f"{kind} with {options}"
