"""A plan: its degrees, micro-batches and schedule, and which combinations are impossible."""

from dataclasses import dataclass

from naranhi.costs.activations import RECOMPUTE
from naranhi.planning.arguments import make_whole, whole
from naranhi.planning.cluster import Cluster
from naranhi.planning.model import Model
from naranhi.planning.stages import cut
from naranhi.schedules import names

SCHEDULES = (
    "one_f_one_b",
    "gpipe",
    "interleaved",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zero_bubble_v",
    "dualpipe_v",
    "inter_layer",
)
V_SHAPED = ("zero_bubble_v", "dualpipe_v")
PRECISIONS = ("bf16", "fp8", "fp32")

# A number beyond these limits was meant in another unit.
MOST_SEQUENCES = 2**17
MOST_TOKENS = 2**27


class PlanError(ValueError):
    """A plan that is not possible; the message says what contradicts what."""


@dataclass(frozen=True)
class Plan:
    """How a model is cut over ranks, and how a step runs.

    Ranks are numbered so that those of one tensor parallel group are neighbours, then those of a
    context parallel group, then data parallel ranks (of which `ep` neighbours share the experts),
    then stages.

    Args:
        dp: Data parallel degree.
        tp: Tensor parallel degree.
        pp: Pipeline stages.
        cp: Context parallel degree: each rank has 1/cp of every sequence.
        ep: Expert parallel degree: neighbouring data parallel ranks share the experts.
        chunks: Model chunks of each stage; above 1 only with the interleaved schedule, and 2 with
            V-shaped schedules.
        microbatch: Sequences of a micro-batch, on a data parallel rank.
        schedule: A name that `schedules.get` knows, of a schedule with a flush.
        zero: The stage of ZeRO, over dp x cp ranks. Stage 3 in a pipeline gathers parameters once a
            step and keeps them, as torchtitan does: once per micro-batch would be too slow.
        recompute: "none", "selective" or "full", as in `costs.transformer_layer_bytes`.
        sequence_parallel: Whether tensor parallel ranks shard norms and dropouts along the
            sequence as well; by default (None) where tp is above 1.
        precision: "bf16"; "fp8" for fp8 matmuls with the rest as in bf16; or "fp32".
        zero_group: Neighbours among the dp x cp ranks that shard the model state; all of them, if
            None. Fewer than all is what FSDP calls hybrid sharding.
        etp: Expert tensor parallel degree: the ranks of a tensor parallel group that cut each
            expert; None means tp. If fewer, the group's other ranks have different experts, which
            `ep` neighbours among dp x cp x tp / etp ranks share. With 1 every expert is whole.

    Raises:
        TypeError: If a degree is not a whole number, or a flag not a bool.
        PlanError: If a number is too small, a name unknown, or arguments contradict each other.
    """

    dp: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    chunks: int = 1
    microbatch: int = 1
    schedule: str = "one_f_one_b"
    zero: int = 0
    recompute: str = "none"
    sequence_parallel: bool | None = None
    precision: str = "bf16"
    zero_group: int | None = None
    etp: int | None = None

    def __post_init__(self) -> None:
        numbers = "dp", "tp", "pp", "cp", "ep", "chunks", "microbatch", "zero"
        make_whole(self, *numbers, optional=("zero_group", "etp"))
        for name in numbers:
            value, least = getattr(self, name), 0 if name == "zero" else 1
            if value < least:
                raise PlanError(f"{name} is at least {least}, not {value}")
        if self.sequence_parallel is None:
            object.__setattr__(self, "sequence_parallel", self.tp > 1)
        elif not isinstance(self.sequence_parallel, bool):
            raise TypeError(f"sequence_parallel is True or False, not {self.sequence_parallel!r}")
        if not isinstance(self.schedule, str):
            raise TypeError(f"schedule is a name, such as 'gpipe', not {self.schedule!r}")
        try:
            object.__setattr__(self, "schedule", names.get(self.schedule).__name__)
        except ValueError as error:
            raise PlanError(str(error)) from None
        for name, value, known in (
            ("schedule", self.schedule, SCHEDULES),
            ("recompute", self.recompute, RECOMPUTE),
            ("precision", self.precision, PRECISIONS),
            ("zero", self.zero, (0, 1, 2, 3)),
        ):
            if value not in known:
                raise PlanError(f"{name} is one of {', '.join(map(str, known))}, not {value!r}")
        if self.v_shaped and self.chunks == 1:
            object.__setattr__(self, "chunks", 2)
        if self.v_shaped and self.chunks != 2:
            raise PlanError(
                f"chunks = {self.chunks} with schedule {self.schedule!r}: a V has 2 on each rank"
            )
        if self.chunks > 1 and self.schedule != "interleaved" and not self.v_shaped:
            raise PlanError(
                f"chunks = {self.chunks} with schedule {self.schedule!r}: only 'interleaved' and "
                "schedules in a V have several chunks on a rank"
            )
        if (self.v_shaped or self.schedule == "interleaved") and self.pp == 1:
            raise PlanError(
                f"schedule {self.schedule!r} with pp = 1: one stage has nothing to interleave"
            )
        self._check_experts()
        if self.zero_group is None:
            object.__setattr__(self, "zero_group", self.replicas)
        elif self.zero_group < 1 or self.replicas % self.zero_group:
            raise PlanError(
                f"zero_group = {self.zero_group} does not divide dp x cp = {self.replicas}"
            )

    def _check_experts(self):
        """Raise PlanError if the experts cannot be divided like this; set `etp` = tp to None."""
        if self.etp == self.tp:
            object.__setattr__(self, "etp", None)
        if self.etp is None:
            if self.replicas % self.ep:
                raise PlanError(
                    f"ep = {self.ep} does not divide dp x cp = {self.replicas}: experts are shared "
                    "by ranks that otherwise hold the same weights (with etp = 1 by those of "
                    "tensor parallel groups, too)"
                )
            return
        if self.etp < 1 or self.tp % self.etp:
            raise PlanError(f"etp = {self.etp} does not divide tp = {self.tp}")
        if not self.sequence_parallel:
            raise PlanError(
                f"etp = {self.etp} below tp = {self.tp} needs sequence_parallel: otherwise all "
                "ranks of a tensor parallel group would send the same tokens to experts"
            )
        among = self.replicas * self.tp // self.etp
        if among % self.ep:
            raise PlanError(f"ep = {self.ep} does not divide dp x cp x tp / etp = {among}")

    @property
    def ranks(self) -> int:
        """The number of GPUs that the plan uses: dp x tp x pp x cp."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def v_shaped(self) -> bool:
        """Whether each rank has one stage on the way down the ranks and one on the way back."""
        return self.schedule in V_SHAPED

    def virtual_stages(self, rank: int) -> tuple[int, ...]:
        """Return the virtual stages of a rank of the pipeline."""
        if self.v_shaped:
            return rank, 2 * self.pp - 1 - rank
        return tuple(range(rank, self.pp * self.chunks, self.pp))

    def rank_of(self, virtual_stage: int) -> int:
        """Return the rank of the pipeline that has a virtual stage."""
        if self.v_shaped:
            return min(virtual_stage, 2 * self.pp - 1 - virtual_stage)
        return virtual_stage % self.pp

    @property
    def kept_whole(self) -> bool:
        """Whether parameters and gradients are whole on each rank until the end of a step."""
        return self.zero < 2 or self.pp > 1

    @property
    def replicas(self) -> int:
        """The ranks that hold the same weights and sum their gradients: dp x cp."""
        return self.dp * self.cp

    @property
    def expert_tp(self) -> int:
        """The ranks of a tensor parallel group that cut each expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_replicas(self) -> int:
        """The ranks that hold the same experts and sum their gradients."""
        return self.replicas * self.tp // self.expert_tp // self.ep

    @property
    def expert_zero_group(self) -> int:
        """The ranks that shard the state of the same experts."""
        return max(1, self.zero_group * self.tp // self.expert_tp // self.ep)

    def microbatches(self, global_batch: int) -> int:
        """Return the number of micro-batches of a rank in a step of `global_batch` sequences.

        Raises:
            PlanError: If the batch does not divide, is too large, or does not suit the schedule.
        """
        global_batch = whole("global_batch", global_batch, "a number of sequences")
        if global_batch > MOST_SEQUENCES:
            raise PlanError(
                f"global_batch = {global_batch} looks like tokens: it counts sequences, so divide "
                "by the sequence length"
            )
        count, rest = divmod(global_batch, self.dp * self.microbatch)
        if rest or count < 1:
            raise PlanError(
                f"global_batch = {global_batch} sequences is not a multiple of dp x microbatch = "
                f"{self.dp} x {self.microbatch}"
            )
        if self.schedule == "interleaved" and count % self.pp:
            raise PlanError(
                f"{count} micro-batches are not a multiple of pp = {self.pp}, "
                "as the interleaved schedule needs"
            )
        if self.schedule == "dualpipe_v" and count < 2 * self.pp:
            raise PlanError(
                f"{count} micro-batches are less than 2 pp = {2 * self.pp}, which dualpipe_v needs"
            )
        return count

    def check(
        self, model: Model, cluster: Cluster, sequence_length: int, global_batch: int
    ) -> None:
        """Raise PlanError if this plan cannot cut this model, cluster or batch.

        Raises:
            TypeError: If the sequence length or the batch is not a whole number.
            PlanError: If the plan does not match the GPUs, the model, the batch or the cluster.
        """
        if self.ranks != cluster.gpus:
            raise PlanError(
                f"dp x tp x pp x cp = {self.dp} x {self.tp} x {self.pp} x {self.cp} = "
                f"{self.ranks}, but the cluster has {cluster.gpus} GPUs (ep counts among dp x cp)"
            )
        sequence_length = whole("sequence_length", sequence_length, "a number of tokens")
        if not 1 <= sequence_length <= MOST_TOKENS:
            raise PlanError(
                f"sequence_length = {sequence_length} cannot be right: it is in tokens, "
                f"from 1 to {MOST_TOKENS}"
            )
        if why := cluster.refuses(self):
            raise PlanError(why)
        if 0 < model.positions < sequence_length:
            raise PlanError(
                f"sequence_length = {sequence_length}, but the model has learned only "
                f"{model.positions} positions"
            )
        count = self.microbatches(global_batch)
        missing = cluster.runs.missing if self.schedule == "one_f_one_b" else None
        if missing is not None and count < self.pp - missing:
            least = f"pp - {missing}" if missing else "pp"
            raise PlanError(
                f"{count} micro-batches are fewer than {least} = {self.pp - missing}, which "
                f"{cluster.engine} needs for 1F1B"
            )
        shards = self.tp if self.sequence_parallel else 1
        degree = "tp" if self.etp is None else "etp"
        sparse, dense = model.experts > 0, not model.experts or model.dense_layers > 0
        for what, total, name, parts in (
            ("heads", model.heads, "tp", self.tp),
            ("ffn", model.ffn if dense else 0, "tp", self.tp),
            ("expert_ffn", model.expert_ffn if sparse else 0, degree, self.expert_tp),
            ("sequence_length", sequence_length, "cp x tp", self.cp * shards),
            ("experts", model.experts, "ep", self.ep),
        ):
            if total % parts:
                raise PlanError(f"{what} = {total} is not a multiple of {name} = {parts}")
        for name, given in (("ep", self.ep > 1), ("etp", self.etp is not None)):
            if given and not model.experts:
                raise PlanError(f"{name} = {getattr(self, name)}, but the model has no experts")
        stages = self.pp * self.chunks
        if cluster.runs.cut == "cumulative" and cut(model, stages, "cumulative").last < stages - 1:
            raise PlanError(
                f"pp = {self.pp}: {cluster.engine} would leave the last stages without a module, "
                "because the output layer alone is more than a stage's share of the operations"
            )
        if self.pp * self.chunks > model.layers + (2 if self.chunks > 1 else 0):
            raise PlanError(
                f"pp x chunks = {self.pp} x {self.chunks} stages, but only {model.layers} layers"
            )
