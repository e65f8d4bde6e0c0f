"""Find what a module has besides the forward of its class: hooks and compiled code."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "full backward pre-hook",
    "_backward_hooks": "backward hook",
    "_state_dict_pre_hooks": "state_dict pre-hook",
    "_state_dict_hooks": "state_dict hook",
    "_load_state_dict_pre_hooks": "load_state_dict pre-hook",
    "_load_state_dict_post_hooks": "load_state_dict post-hook",
}


def hooks_of(module: nn.Module) -> Iterator[str]:
    """Yield a description of each of a module's own hooks, such as "the forward hook scale"."""
    for place, kind in HOOKS.items():
        for hook in getattr(module, place).values():
            yield f"the {kind} {getattr(hook, '__name__', type(hook).__name__)}"


def is_compiled(module: nn.Module) -> bool:
    """Return whether a call of the module runs compiled code."""
    return (
        module._compiled_call_impl is not None
        or "_orig_mod" in module._modules
        or isinstance(module, torch.jit.ScriptModule)
    )


def require_own_forward(module: nn.Module, function: str) -> None:
    """Raise ValueError if the module has hooks, or a forward other than that of its class.

    Args:
        module: the module that will be replaced.
        function: the name of the function that replaces it, for the message.
    """
    hook = next(hooks_of(module), None)
    if hook:
        raise ValueError(
            f"{hook} would be lost, or get only parts of tensors: make its effect permanent, as "
            f"prune.remove and remove_weight_norm do, or register it on what {function} returns"
        )
    if "forward" in vars(module) or is_compiled(module):
        raise ValueError(
            "its forward was replaced or compiled, and that would be lost: replace or compile the "
            f"forward of what {function} returns"
        )
