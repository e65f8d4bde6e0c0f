"""Checks of which layers can be split: those that are exactly what their class says.

A split layer takes over the parameters of an unsplit layer. Anything else about the unsplit layer
(a subclass with its own forward, hooks, a weight computed from others) would be lost silently, and
a different model trained. So these checks raise an error that names what would be lost.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from naranhi.autograd.module_hooks import require_own_forward
from naranhi.autograd.parameter_hooks import has_hooks
from naranhi.models import LlamaBlock, RotaryAttention

# Compared by name, because only users of transformers import it.
CONV1D = "transformers.pytorch_utils", "Conv1D"
GPT2_ATTENTION = "transformers.models.gpt2.modeling_gpt2", "GPT2Attention"
PRETRAINED = "transformers.modeling_utils", "PreTrainedModel"


def require_linear(layer: nn.Module) -> None:
    """Raise TypeError or ValueError unless this is a plain Linear or GPT-2's Conv1D."""
    _require_no_parametrization(layer)
    if type(layer) is not nn.Linear and not is_conv1d(layer):
        raise _wrong_kind("a Linear or GPT-2's Conv1D is needed", layer, nn.Linear)
    _require_plain(layer, "weight", "bias")


def is_conv1d(layer: nn.Module) -> bool:
    """Return whether this is GPT-2's linear layer, whose weight is (inputs, outputs)."""
    return _kind(layer) == CONV1D


def require_head(layer: nn.Module) -> None:
    """Raise TypeError or ValueError unless this is a plain Linear."""
    _require_no_parametrization(layer)
    if type(layer) is not nn.Linear:
        raise _wrong_kind("a Linear is needed", layer, nn.Linear)
    _require_plain(layer, "weight", "bias")


def require_embedding(layer: nn.Module) -> None:
    """Raise TypeError or ValueError unless this is a plain Embedding; padding_idx is allowed."""
    _require_no_parametrization(layer)
    if type(layer) is not nn.Embedding:
        raise _wrong_kind("an Embedding is needed", layer, nn.Embedding)
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        value = getattr(layer, option)
        if value is not None and value is not False:
            raise ValueError(
                f"an embedding with {option}={value} is not provided for: make it "
                "without, or leave it out of the plan"
            )
    _require_plain(layer, "weight")


def require_attention(layer: nn.Module) -> None:
    """Raise TypeError or ValueError unless this is the attention of transformers' GPT-2."""
    if _kind(layer) != GPT2_ATTENTION:
        raise TypeError(f"GPT-2's attention is needed, not {type(layer).__name__}")
    _require_own_forward(layer)


def require_grouped_heads(layer: nn.Module, ranks: int, norms: bool) -> None:
    """Raise TypeError or ValueError unless ranks can share an attention of `models.llama`."""
    if type(layer) is not RotaryAttention:
        raise TypeError(f"the attention of models.llama is needed, not {type(layer).__name__}")
    if layer.groups % ranks:
        raise ValueError(
            f"{ranks} ranks do not divide {layer.groups} heads of keys and values, and each rank "
            "needs whole heads: use a smaller tensor group"
        )
    if (layer.q_norm is not None) != norms:
        raise ValueError(
            f"it {'has no' if norms else 'has'} norms of heads, and the plan is for attention "
            f"{'with' if norms else 'without'} them: use llama_plan(head_norms={not norms})"
        )


def require_tokenwise(layer: nn.Module) -> None:
    """Raise TypeError or ValueError if a layer may be more than a function of each token."""
    _require_no_parametrization(layer)
    if isinstance(layer, _NormBase):
        raise TypeError(
            f"{type(layer).__name__} computes statistics over all tokens, of which "
            "this rank has a part"
        )
    if isinstance(layer, _DropoutNd) and type(layer) is not nn.Dropout:
        raise _wrong_kind("a Dropout is needed", layer, nn.Dropout)
    _require_own_forward(layer)
    if list(layer.children()):
        raise ValueError("the plan has to name the layers inside it, one by one")
    for name, param in layer.named_parameters():
        _require_plain_parameter(name, param)


def require_slow_path(parent: nn.Module) -> None:
    """Raise ValueError if a module would use its children's weights without calling them."""
    is_fast = torch.backends.mha.get_fastpath_enabled()
    if isinstance(parent, nn.TransformerEncoderLayer) and is_fast:
        raise ValueError(
            "in evaluation, nn.TransformerEncoderLayer uses its layers' weights directly, and "
            "would mistake a shard for the whole weight: call "
            "torch.backends.mha.set_fastpath_enabled(False) first"
        )


def require_layers_of_tokens(model: nn.Module) -> None:
    """Raise ValueError for modules that need all tokens of a sequence: a rank has only some."""
    for name, module in model.named_modules():
        if isinstance(module, LlamaBlock) and module.sparse:
            raise ValueError(
                f"{name} has a mixture of experts, which would get the gradient of this rank's "
                "tokens only: call expert_parallel.divide_experts first"
            )
        if any((cls.__module__, cls.__name__) == PRETRAINED for cls in type(module).__mro__):
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__} of transformers, which counts "
                "positions and builds masks by the tokens that it sees, here a part of them: pass "
                "sequence=False, or make layers of it, as models.gpt2_layers does"
            )


def _kind(layer):
    return type(layer).__module__, type(layer).__name__


def _wrong_kind(needed, layer, base):
    name = type(layer).__name__
    if isinstance(layer, base):
        return TypeError(f"{needed}, not the subclass {name}, whose own behaviour would be lost")
    return TypeError(f"{needed}, not {name}")


def _require_no_parametrization(layer):
    for name, chain in layer._modules.get("parametrizations", nn.ModuleDict()).items():
        raise ValueError(
            f"its {name} is parametrized by {type(chain[0]).__name__}, which would be lost: call "
            "torch.nn.utils.parametrize.remove_parametrizations, or leave it out of the plan"
        )


def _require_own_forward(layer):
    require_own_forward(layer, "parallelize")


def _require_plain(layer, *names):
    """Raise ValueError if a layer has hooks, or holds anything but these parameters."""
    _require_own_forward(layer)
    held = {*layer._parameters, *layer._buffers, *layer._modules}
    if held != set(names):
        differ = ", ".join(sorted(held ^ set(names)))
        raise ValueError(
            f"it must hold {' and '.join(names)}, and nothing else, but differs in {differ}: "
            "what they do would be lost"
        )
    for name, param in layer.named_parameters():
        _require_plain_parameter(name, param)


def _require_plain_parameter(name, param):
    if type(param) is not nn.Parameter:
        raise TypeError(f"its {name} is a {type(param).__name__}, not a torch.nn.Parameter")
    if has_hooks(param):
        raise ValueError(
            f"its {name} has a hook, which would see only a part of the gradient: register a hook "
            "for such parts on the parameters of what parallelize returns"
        )
