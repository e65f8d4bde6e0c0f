"""A model split into units for ZeRO: modules whose parameters move together.

Parameters outside of all units, and those shared with a module outside of their unit (tied
embeddings), belong to the root, the last unit, which is the model itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch.distributed as dist
from torch import nn

from naranhi.distributed import agree, raise_on_all
from naranhi.distributed.agreement import Axes, groups_of
from naranhi.zero.flat_param import FlatParam
from naranhi.zero.mixed_precision import computes_in, require_mixed
from naranhi.zero.param_groups import numbered
from naranhi.zero.phase import ParamState

SMALL = 2**15  # elements: a shorter message costs its start rather than its length


class Unit:
    """Modules and their parameters, in a `FlatParam` for each dtype, frozen ones and experts apart.

    The other attributes are the state of a step, which `hooks.Hooks` updates.

    Args:
        number: The unit's index among the units.
        name: Its name, for messages and events.
        modules: Its modules, in the order in which they run.
        flats: Its flat parameters.
    """

    number: int
    name: str
    modules: Sequence[nn.Module]
    flats: Sequence[FlatParam]
    trained: list[FlatParam]
    flat_of: dict[nn.Parameter, FlatParam]
    state: ParamState
    hidden: Counter[nn.Module]
    awaited: set[nn.Parameter]

    def __init__(
        self, number: int, name: str, modules: Sequence[nn.Module], flats: Sequence[FlatParam]
    ) -> None:
        self.number, self.name, self.modules, self.flats = number, name, modules, flats
        self.trained = [flat for flat in flats if flat.trained]
        self.flat_of = {param: flat for flat in self.trained for param in flat.parameters}
        self.state, self._transfer = ParamState.SHARDED, None
        self.settle()

    def settle(self) -> None:
        """Prepare for another backward."""
        self.uses = 0  # in recorded forwards whose backward has not run yet
        self.hidden = Counter()  # per module: forwards under no_grad that may be recomputed
        self.awaited = set()  # parameters whose gradients must arrive before the unit is done
        self.done = False  # whether its part of this backward is over

    @property
    def over(self) -> bool:
        """Return whether the backward in progress has nothing left to do in this unit."""
        return not (self.uses or any(self.hidden.values()) or self.awaited)

    # --- parameters, at stage 3 ------------------------------------------------------------------

    def unshard(self) -> None:
        """Start the all-gather of its parameters."""
        self._transfer = Transfer(flat.all_gather() for flat in self.flats)
        self.state = ParamState.UNSHARDING

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather, and make the parameters views of its result."""
        self._transfer.finish()
        self._transfer = None
        for flat in self.flats:
            flat.use_unsharded()
        self.state = ParamState.UNSHARDED

    def reshard(self) -> None:
        """Free its parameters, after the all-gather in flight, if any."""
        if self._transfer:
            self._transfer.finish()  # it writes into this memory until it ends
            self._transfer = None
        for flat in self.flats:
            flat.reshard()
        self.state = ParamState.SHARDED

    # --- gradients -------------------------------------------------------------------------------

    def accumulate(self) -> None:
        """Move its parameters' gradients into the flat gradients."""
        for flat in self.trained:
            flat.accumulate()

    def reduce_scatter(self, *beside: Iterator[None]) -> Transfer:
        """Start to reduce-scatter its gradients and run the kernels `beside`; return a Transfer."""
        return Transfer(
            [*(kernel for flat in self.trained for kernel in flat.reduce_scatter()), *beside]
        )

    def keep_reduced(self) -> None:
        """Keep the reduced shards of its gradients."""
        for flat in self.trained:
            flat.keep_reduced()


class Transfer:
    """Messages in flight: kernels of `collectives`, started together and advanced in turn.

    Args:
        kernels: The kernels to run; each makes its first step at once.
    """

    steps: int

    def __init__(self, kernels: Iterable[Iterator[None]]) -> None:
        self._kernels, self.steps = list(kernels), 0
        self.advance()

    def advance(self) -> None:
        """Wait for the messages in flight, and start those of the next step."""
        self._kernels = [kernel for kernel in self._kernels if next(kernel, "ended") != "ended"]
        self.steps += 1

    def finish(self) -> None:
        """Run the kernels to their ends."""
        while self._kernels:
            self.advance()


def cut(
    model: nn.Module,
    units: Iterable[nn.Module | Iterable[nn.Module]] | None,
    groups: Iterable[dict[str, Any]] | None,
    stage: int,
    precision: str,
    axes: Axes,
    copies: Mapping[nn.Parameter, tuple[dist.ProcessGroup, ...]],
) -> tuple[list[Unit], list[dict[str, Any]]]:
    """Return the units of a model, the root last, and the options of each parameter group.

    The arguments, and which of them raise an error, are as in `zero.Zero`; parameters are sharded
    over the first of the axes, those of experts over their `copies`.
    """
    named = dict(model.named_parameters())
    name_of = {param: name for name, param in named.items()}

    def read():
        runs = list(map(_as_run, children(model) if units is None else units))
        if precision == "bf16":
            require_mixed(model)
        return runs, _names(model, runs), _owners(runs, model), numbered(groups, name_of)

    runs, names, owner, (group_of, options) = raise_on_all(
        read, axes, errors=(ValueError,), kind=ValueError
    )
    root = (model,)
    dtype_of = {param: computes_in(precision, name, param) for name, param in named.items()}
    where = {module: name for name, module in model.named_modules()}
    agree(
        axes,
        stage=stage,
        precision=precision,
        units=[", ".join(where[module] for module in run) for run in runs],
        parameter_groups={name_of[param]: number for param, number in group_of.items()},
    )
    units, tags, everywhere = [], count(1), (*groups_of(axes),)
    for run in [*runs, root]:
        own = [param for param in named.values() if owner.get(param, root) == run]
        kinds = {}
        for param in sorted(own, key=lambda param: group_of.get(param, 0)):
            kind = param.requires_grad, param.dtype, copies.get(param, everywhere)
            kinds.setdefault(kind, []).append((name_of[param], param))
        flats = [
            FlatParam(some, group_of, stage, dtype_of[some[0][1]], own, next(tags))
            for (_, _, own), some in kinds.items()
        ]
        if flats or run == root:
            units.append(Unit(len(units), names.get(run, "root"), run, flats))
    return units, options


def children(model: nn.Module) -> list[nn.Module]:
    """Return the model's children, each container without a forward replaced by its own children.

    Such a container (a list of modules) is not called, so it could not be gathered in time. A child
    that is also inside another child (an embedding that encoder and decoder share) is left out.

    Args:
        model: The module whose children become units.
    """
    unique = _called(model)
    inside = {inner for child in unique for inner in child.modules() if inner is not child}
    return [child for child in unique if child not in inside]


def joined(modules: Iterable[nn.Module], small: int = SMALL) -> Iterator[tuple[nn.Module, ...]]:
    """Join small modules that are adjacent into units.

    Adjacent modules of fewer than `small` elements each are joined until together they have `small`
    or more.

    Args:
        modules: Modules in the order in which they run.
        small: The size, in elements, below which a module is joined.

    Yields:
        The units, as tuples of modules.
    """
    run, size = (), 0
    for module in modules:
        own = sum(param.numel() for param in module.parameters())
        if run and (size >= small or own >= small):
            yield run
            run, size = (), 0
        run, size = (*run, module), size + own
    if run:
        yield run


def _called(model):
    """Return {child: None}, each once; replace children without a forward by their own children."""
    unique = {}
    for child in model.children():
        unique.update(_called(child) if _is_bare(child) else {child: None})
    return unique


def _is_bare(module):
    """Return whether a module has no forward, and so is never called."""
    return type(module).forward is nn.Module.forward


def _as_run(unit):
    return (unit,) if isinstance(unit, nn.Module) else tuple(unit)


def _owners(runs, model):
    """Return {parameter: its run}, the root if a module outside of that run has it, too."""
    owner, root = {}, (model,)
    for run in runs:
        for param in {param for module in run for param in module.parameters()}:
            owner[param] = root if param in owner else run
    # Modules that are reached without a unit on the way may compute while no unit is gathered.
    seen, reached = {module for run in runs for module in run}, [model]
    while reached:
        module = reached.pop()
        if module not in seen:
            seen.add(module)
            reached += module.children()
            owner.update(dict.fromkeys(module.parameters(recurse=False), root))
    return owner


def _names(model, runs):
    """Return {run: its name}, or raise ValueError."""
    where = {module: name for name, module in model.named_modules()}
    names, taken = {}, {}
    for run in runs:
        if not run:
            raise ValueError("a unit has no module")
        for module in run:
            if module not in where or module is model:
                raise ValueError(
                    f"a unit has to be a module in the model, not {type(module).__name__}"
                )
            if module in taken:
                raise ValueError(f"module {where[module]} is in the units twice")
            if _is_bare(module) and not _is_bare(model):  # a bare model: `ZeroStages`, no hooks
                raise ValueError(
                    f"unit {where[module]} has no forward to be called: make its children units"
                )
            taken[module] = run
        names[run] = where[run[0]] + f" to {where[run[-1]]}" * (len(run) > 1)
    for module in taken:
        for inner in module.modules():
            if inner is not module and inner in taken:
                raise ValueError(f"unit {where[inner]} lies in unit {where[module]}")
    return names
