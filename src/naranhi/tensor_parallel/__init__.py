"""Tensor and sequence parallelism: layers whose weights are sharded over ranks."""

from naranhi.tensor_parallel.attention import ParallelAttention
from naranhi.tensor_parallel.gradient_norm import clip_grad_norm_
from naranhi.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from naranhi.tensor_parallel.mappings import (
    copy_to_group,
    gather_from_group,
    gather_from_sequence,
    reduce_from_group,
    reduce_scatter_to_sequence,
    scatter_to_group,
)
from naranhi.tensor_parallel.materialize import materialize
from naranhi.tensor_parallel.parallelize import parallelize
from naranhi.tensor_parallel.plans import (
    Column,
    GroupedHeads,
    Heads,
    PartialGradient,
    Row,
    SequenceParallel,
    Vocabulary,
    gpt2_plan,
    llama_plan,
    mlp_plan,
)
from naranhi.tensor_parallel.random import fork_rng
from naranhi.tensor_parallel.sequence_gradients import (
    sum_before_other_hooks,
    sum_sequence_gradients,
)
from naranhi.tensor_parallel.shards import full_state_dict, load_full_state_dict
from naranhi.tensor_parallel.vocabulary import (
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    vocabulary_cross_entropy,
)

__all__ = [
    "Column",
    "ColumnParallelLinear",
    "GroupedHeads",
    "Heads",
    "ParallelAttention",
    "PartialGradient",
    "Row",
    "RowParallelLinear",
    "SequenceParallel",
    "Vocabulary",
    "VocabularyParallelEmbedding",
    "VocabularyParallelHead",
    "clip_grad_norm_",
    "copy_to_group",
    "fork_rng",
    "full_state_dict",
    "gather_from_group",
    "gather_from_sequence",
    "gpt2_plan",
    "llama_plan",
    "load_full_state_dict",
    "materialize",
    "mlp_plan",
    "parallelize",
    "reduce_from_group",
    "reduce_scatter_to_sequence",
    "scatter_to_group",
    "sum_before_other_hooks",
    "sum_sequence_gradients",
    "vocabulary_cross_entropy",
]
