"""What training costs, by formula: bytes, messages, seconds, activations, failures.

Nothing here needs torch.
"""

from naranhi.costs.activations import (
    Item,
    gpt2_block_items,
    transformer_layer_bytes,
    transformer_layer_items,
)
from naranhi.costs.communication import (
    ALGORITHMS,
    POWER_OF_TWO_ONLY,
    algorithm_bandwidth,
    bus_bandwidth,
    bytes_sent,
    collective_seconds,
    fastest,
    fit_alpha_beta,
)
from naranhi.costs.context import (
    CONTEXT_WAYS,
    context_bytes_saved,
    context_bytes_sent,
    context_idle,
    context_messages,
)
from naranhi.costs.experts import (
    MOE_EXCHANGES,
    break_even_tokens,
    gathered_experts_bytes_sent,
    imbalance,
    moe_bytes_sent,
    moe_count_bytes_sent,
    moe_rows_sent,
    moe_seconds,
)
from naranhi.costs.failures import checkpoint_interval, goodput
from naranhi.costs.model_state import (
    hybrid_bytes_sent,
    pipeline_zero_bytes,
    pipeline_zero_bytes_sent,
    zero_bytes,
    zero_bytes_sent,
)

__all__ = [
    "ALGORITHMS",
    "CONTEXT_WAYS",
    "MOE_EXCHANGES",
    "POWER_OF_TWO_ONLY",
    "Item",
    "algorithm_bandwidth",
    "break_even_tokens",
    "bus_bandwidth",
    "bytes_sent",
    "checkpoint_interval",
    "collective_seconds",
    "context_bytes_saved",
    "context_bytes_sent",
    "context_idle",
    "context_messages",
    "fastest",
    "fit_alpha_beta",
    "gathered_experts_bytes_sent",
    "goodput",
    "gpt2_block_items",
    "hybrid_bytes_sent",
    "imbalance",
    "moe_bytes_sent",
    "moe_count_bytes_sent",
    "moe_rows_sent",
    "moe_seconds",
    "pipeline_zero_bytes",
    "pipeline_zero_bytes_sent",
    "transformer_layer_bytes",
    "transformer_layer_items",
    "zero_bytes",
    "zero_bytes_sent",
]
