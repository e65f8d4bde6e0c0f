"""Activation memory, counted: the bytes kept from the forward until the backward has used them.

What is kept is not "the outputs of the layers" but whatever each operation's backward needs; see
`autograd.functions`. `costs.transformer_layer_bytes` predicts it. Units: bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class Saved(NamedTuple):
    """A storage that the backward needs; a sparse tensor has one for values and one per index.

    Attributes:
        layer: the name of the layer that saved it first.
        shape: the shape of the tensor that this layer saved.
        dtype: its dtype.
        bytes: the bytes of the whole storage.
    """

    layer: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


class SavedTensors(saved_tensors_hooks):
    """A context that counts what operations save for their backward.

        with SavedTensors(layers) as saved:
            loss = model(x)
        saved.bytes, saved.by_layer

    Leave the context before the backward to count the forward. Stay in it to count what a
    recomputation saves as well: `items` then includes that, and `peak` is the true peak.

    Runs on any device, including torch's "meta" device, which counts without computing.

    Args:
        layers: a list of modules, a dict of modules by name, or one module, whose children are then
            the layers (the module itself, if it has none).

    Attributes:
        items: one `Saved` per storage, whoever saves it, however often, and through whatever views.
            Its bytes are those of the whole storage, because a view keeps all of it alive.
        bytes: the sum over the items.
        by_layer: the sums by the layer's name ("" is outside of all layers).
        parameter_bytes: saved parameters and buffers of the layers. They are not activations,
            because they stay alive anyway.
        held: the bytes of activations kept at this moment, also after the context is left. A tensor
            that a backward has used, or that nothing references any more, no longer counts.
        peak: the maximum of `held` so far.
    """

    parameter_bytes: int
    held: int
    peak: int

    def __init__(self, layers: nn.Module | dict[str, nn.Module] | Iterable[nn.Module]) -> None:
        super().__init__(self.pack, self._unpack)
        self.layers: dict[str, nn.Module] = _named(layers)
        self.items: list[Saved] = []
        self.parameter_bytes = self.held = self.peak = 0
        self._within, self._hooks = [""], []
        self._known, self._users = {}, {}  # storages: of parameters; of activations, with users

    @property
    def bytes(self) -> int:
        """The sum over the items."""
        return sum(item.bytes for item in self.items)

    @property
    def by_layer(self) -> dict[str, int]:
        """The sums of bytes by the layer's name ("" is outside of all layers)."""
        sums = dict.fromkeys(self.layers, 0)
        for item in self.items:
            sums[item.layer] = sums.get(item.layer, 0) + item.bytes
        return sums

    def __enter__(self) -> Self:
        for name, layer in self.layers.items():
            for tensor in (*layer.parameters(), *layer.buffers()):
                for part in _dense_parts(tensor):
                    self._known.setdefault(part.untyped_storage(), False)
            self._hooks += [
                layer.register_forward_pre_hook(lambda *_, name=name: self._within.append(name)),
                layer.register_forward_hook(self._leave, always_call=True),
            ]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        while self._hooks:
            self._hooks.pop().remove()

    def _leave(self, *_):
        self._within.pop()

    def pack(self, tensor: torch.Tensor) -> _Kept:
        """Count a tensor that autograd saves; return the object to save instead."""
        activations = []
        for part in _dense_parts(tensor):
            storage = part.untyped_storage()
            if storage not in self._known:
                activations.append(part.detach())
            elif not self._known[storage]:
                self._known[storage] = True
                self.parameter_bytes += storage.nbytes()
        return _Kept(self, tensor, activations)

    def _unpack(self, kept):
        # Autograd makes this check itself, but not for tensors that hooks have packed.
        if kept.tensor._version != kept.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(kept.tensor.shape)} that the backward needs has been "
                f"modified by an inplace operation: it is at version {kept.tensor._version}, not "
                f"{kept.version}; change a clone() of it instead"
            )
        return kept.tensor

    def hold(self, tensor: torch.Tensor) -> None:
        """Count one more user of the tensor's storage."""
        storage = tensor.untyped_storage()
        users = self._users.get(id(storage), 0)
        self._users[id(storage)] = users + 1
        if not users:
            self.items.append(
                Saved(self._within[-1], tuple(tensor.shape), tensor.dtype, storage.nbytes())
            )
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)

    def release(self, tensor: torch.Tensor) -> None:
        """Count one user less of the tensor's storage."""
        storage = tensor.untyped_storage()
        self._users[id(storage)] -= 1
        if not self._users[id(storage)]:
            del self._users[id(storage)]
            self.held -= storage.nbytes()


class _Kept:
    """A saved tensor in autograd's graph: once the graph frees it, it is no longer held.

    Args:
        saved: the context that counts it.
        tensor: the tensor that autograd saves.
        activations: the parts of it that count as activations.
    """

    saved: SavedTensors
    tensor: torch.Tensor
    version: int
    activations: list[torch.Tensor]

    def __init__(
        self, saved: SavedTensors, tensor: torch.Tensor, activations: list[torch.Tensor]
    ) -> None:
        # Detached: an operation's output references its node, which would reference the output.
        self.saved, self.tensor, self.version = saved, tensor.detach(), tensor._version
        self.activations = activations
        for part in activations:
            saved.hold(part)

    def __del__(self) -> None:
        for part in self.activations:
            self.saved.release(part)


def _dense_parts(tensor):
    """Return the tensors that a sparse tensor consists of; a dense tensor is its only part."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def _named(layers):
    if isinstance(layers, nn.Module):
        return dict(layers.named_children()) or {type(layers).__name__: layers}
    if isinstance(layers, dict):
        return dict(layers)
    return {f"{i} {type(layer).__name__}": layer for i, layer in enumerate(layers)}
