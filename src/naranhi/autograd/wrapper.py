"""A module around a layer, which looks like the layer from outside."""

from __future__ import annotations

from typing import Any

from torch import nn


class Wrapper(nn.Module):
    """A module with one layer, whose attributes and names in the state_dict are those of the layer.

    Args:
        layer: the layer inside.

    Source: `torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper`.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_state_dict_post_hook(_strip_layer)
        self.register_load_state_dict_pre_hook(_add_layer)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Special methods are the wrapper's own, so that copying it copies more than the layer.
            if name == "layer" or name.startswith("__"):
                raise
            return getattr(self.layer, name)


def unwrapped_name(module: nn.Module, name: str) -> str:
    """Return a parameter's or buffer's name as it is in the state_dict: without the wrappers.

    Args:
        module: the module that has it.
        name: its name as in `named_parameters` or `named_buffers`.
    """
    parts = []
    for part in name.split("."):
        if not (isinstance(module, Wrapper) and part == "layer"):
            parts.append(part)
        module = getattr(module, part)
    return ".".join(parts)


def _strip_layer(module, state_dict, prefix, local_metadata):
    inner = prefix + "layer."
    for name in [name for name in state_dict if name.startswith(inner)]:
        state_dict[prefix + name[len(inner) :]] = state_dict.pop(name)


def _add_layer(module, state_dict, prefix, *_):
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}layer.{name[len(prefix) :]}"] = state_dict.pop(name)
