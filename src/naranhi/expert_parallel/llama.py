"""Mixtures of experts of Llama's kind (Mixtral, Qwen3-MoE), divided over ranks.

`models.llama` leaves a mixture as transformers has it, with all experts on every rank. Here a `MoE`
takes its place, with the same weights under different names. `MoE` computes `x @ up`, transformers
`x @ gate_up_proj.T`, so each expert is transposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from naranhi.autograd.module_hooks import require_own_forward
from naranhi.autograd.parameter_hooks import has_hooks
from naranhi.distributed import agree, raise_on_all
from naranhi.expert_parallel.experts_mlp import in_place_of_mlp, require_copies_on
from naranhi.expert_parallel.moe import MoE
from naranhi.models import LlamaBlock
from naranhi.tensor_parallel.materialize import materialize

THEIRS = {
    "gate.weight": "moe.router.weight",
    "experts.gate_up_proj": "moe.up",
    "experts.down_proj": "moe.down",
}
OURS = {ours: theirs for theirs, ours in THEIRS.items()}


def divide_experts(
    layers: Sequence[nn.Module],
    group: dist.ProcessGroup | None = None,
    *,
    capacity_factor: float | None = None,
    replicas: dist.ProcessGroup | None = None,
    coefficient: float | None = None,
    tensor: dist.ProcessGroup | None = None,
    sequence: bool = False,
) -> list[nn.Module]:
    """Divide the experts of the sparse blocks of `models.llama`, in place, and return the layers.

    Together the ranks compute what the layers did, up to rounding. If a rank raises an error,
    all layers stay unchanged.

    Args:
        layers: the layers of `models.llama`, the same on every rank. On the meta device they have
            no weights yet: give them by `tensor_parallel.materialize`, from `divided_state`.
        group: see `MoE`.
        capacity_factor: see `MoE`.
        replicas: see `MoE`.
        coefficient: see `ExpertsMLP`. (Transformers adds the configuration's `router_aux_loss_coef`
            times one loss of all blocks together, if `output_router_logits` is set. That loss is
            `top_k` x the mean of these losses if all blocks choose in the same proportions.)
        tensor: see `add_experts`.
        sequence: see `add_experts`.

    Raises:
        ValueError: on every rank: no block has experts; a mixture has hooks, or parameters besides
            router and experts; ranks have different mixtures; or see `MoE`. Or `replicas` lacks
            ranks of `tensor`.
    """
    tensor = require_copies_on(tensor, replicas)
    axes = [group or dist.group.WORLD, *([replicas] if replicas else [])]
    sparse = raise_on_all(partial(_sparse, layers), axes, errors=(ValueError,), kind=ValueError)
    mixtures = {str(number): layers[number].mlp for number in sparse}
    agree(axes, mixtures_of_experts=nn.ModuleDict(mixtures))
    options = {"group": group, "capacity_factor": capacity_factor, "replicas": replicas}
    divided = [_divided(mixture, **options) for mixture in mixtures.values()]
    for number, moe in zip(sparse, divided, strict=True):
        layers[number].mlp = in_place_of_mlp(moe, coefficient, tensor, sequence)
    return list(layers)


def _sparse(layers):
    """Return the indices of the blocks with experts; raise ValueError if anything would be lost."""
    blocks = [n for n, layer in enumerate(layers) if isinstance(layer, LlamaBlock) and layer.sparse]
    if not blocks:
        raise ValueError(f"among {len(layers)} layers there is no block with experts")
    for number in blocks:
        mixture = layers[number].mlp
        params = dict(mixture.named_parameters())
        if params.keys() != THEIRS.keys():
            raise ValueError(
                f"the mixture of layer {number} has {', '.join(sorted(params))}, and not just "
                f"{', '.join(sorted(THEIRS))}"
            )
        for module in mixture.modules():
            require_own_forward(module, "divide_experts")
        for name in [name for name, param in params.items() if has_hooks(param)]:
            raise ValueError(f"{name} of layer {number} has a hook, which would be lost")
    return blocks


def _divided(mixture, **options):
    """Return this rank's part of a mixture of transformers."""
    router, experts = mixture.gate, mixture.experts
    moe = MoE(
        experts.hidden_dim,
        experts.intermediate_dim,
        experts.num_experts,
        router.top_k,
        gate=experts.act_fn,
        normalize=getattr(router, "norm_topk_prob", True),  # Mixtral always does
        device="meta",
        **options,
    )
    for name, param in mixture.named_parameters():
        own = moe.get_parameter(THEIRS[name].removeprefix("moe."))
        own.data = own.data.to(param.dtype)
        own.requires_grad_(param.requires_grad)
    if not router.weight.is_meta:
        state = divided_state(mixture.state_dict())
        materialize(moe, {name.removeprefix("moe."): whole for name, whole in state.items()})
    return moe


def divided_state(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return whole weights of `models.llama` with the names and layout of `divide_experts`.

    Args:
        state: {name: whole tensor}; tensors outside mixtures stay as they are.
    """
    return _renamed(state, THEIRS)


def undivided_state(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return whole weights with the names and layout of `models.llama`: undo `divided_state`.

    Args:
        state: {name: whole tensor}, such as from `checkpoint.consolidated_state_dict`.
    """
    return _renamed(state, OURS)


def _renamed(state, names):
    renamed = {}
    for name, tensor in state.items():
        old = next((old for old in names if name.endswith(old)), "")
        new = name.removesuffix(old) + names.get(old, "")
        renamed[new] = tensor.transpose(1, 2) if old and tensor.dim() == 3 else tensor
    return renamed
