"""Which layers are on which stage.

The embedding is on the first virtual stage, the output layer and the loss on `head`, which is the
last one unless an engine cuts differently.
"""

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from naranhi.planning.model import Model


class StageTimes(NamedTuple):
    """Seconds of a virtual stage for one micro-batch, and what they are made of."""

    forward: float
    backward: float
    parts: dict[str, float]


class Cut(NamedTuple):
    """A model cut into virtual stages.

    Attributes:
        layers: The numbers of each virtual stage's layers.
        head: The virtual stage of the output layer.
        last: The last virtual stage that has anything to do.
    """

    layers: tuple[tuple[int, ...], ...]
    head: int
    last: int


@lru_cache(maxsize=4096)
def cut(model: Model, stages: int, how: str = "uniform") -> Cut:
    """Cut a model into virtual stages.

    Args:
        model: The model.
        stages: The number of virtual stages.
        how: "uniform" for equally many layers; if they do not divide, middle stages get the extra
            layers first, because the ends also have the embedding and the output layer. "last" for
            the same with the extra layers in the last stages. "cumulative" for nanotron's rule:
            go to the next stage after the module with which the cumulative operations, including
            the output layer's, reach this stage's share.
    """
    if how != "cumulative":
        each, more = divmod(model.layers, stages)
        longer = set([*range(1, stages - 1), 0, stages - 1][:more])
        if how == "last":
            longer = set(range(stages - more, stages))
        counts = [each + (stage in longer) for stage in range(stages)]
        ends = accumulate(counts)
        layers = tuple(
            tuple(range(end - count, end)) for end, count in zip(ends, counts, strict=True)
        )
        return Cut(layers, stages - 1, stages - 1)
    costs = [sum(m.rows * m.columns for m in model.layer_matmuls(n)) for n in range(model.layers)]
    # After the layers: the last norm, the output layer, a cast to fp32, the loss.
    modules = [*enumerate(costs), ("norm", 0), ("head", model.embedding_parameters)]
    modules += [("cast", 0), ("loss", 0)]
    whole, so_far, stage, head = sum(cost for _, cost in modules), 0, 0, 0
    parts = [[] for _ in range(stages)]
    for what, cost in modules:
        if isinstance(what, int):
            parts[stage].append(what)
        elif what == "head":
            head = stage
        last = stage
        so_far += cost
        if so_far >= whole * ((stage + 1) / stages) and stage < stages - 1:
            stage += 1
    return Cut(tuple(map(tuple, parts)), head, last)
