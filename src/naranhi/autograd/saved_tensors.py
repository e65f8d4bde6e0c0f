"""Activation memory, counted: the bytes kept from the forward until the backward has used them.

What is kept is not "the outputs of the layers" but whatever each operation's backward asks for; see
`autograd.functions`. `costs.transformer_layer_bytes` predicts it. Units: bytes.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class Saved(NamedTuple):
    """A storage that the backward needs: the layer that first asked for it, and as what tensor."""

    layer: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


class SavedTensors(saved_tensors_hooks):
    """Counts what operations save for their backward while this context is entered.

        with SavedTensors(layers) as saved:
            loss = model(x)
        saved.bytes, saved.by_layer

    layers: a list of modules, a dictionary of them by name, or one module, whose children are then
    its layers (itself, if it has none).

    items: one `Saved` a storage, whoever saves it, however often, and through whatever views; its
    bytes are those of the whole storage, as a view keeps all of it alive.
    bytes, by_layer: their sum, and their sums by the layer's name ("" is outside of all layers).
    parameter_bytes: saved too, but no activations: the layers' parameters and buffers live anyway.
    held: the bytes of activations that are kept at this moment, also after the context is left:
    what a backward has used, or nobody can reach any more, is gone.
    peak: the most that `held` has been.

    Leave the context before the backward to count the forward. Stay in it to count what a
    recomputation saves as well: `items` then has that again, and `peak` tells the truth.

    Runs on any device, torch's "meta" included, which counts without computing.
    """

    def __init__(self, layers):
        super().__init__(self.pack, self._unpack)
        self.layers = _named(layers)
        self.items = []
        self.parameter_bytes = self.held = self.peak = 0
        self._within, self._hooks = [""], []
        self._known, self._users = {}, {}  # storages of parameters; of activations, and by how many

    @property
    def bytes(self):
        return sum(item.bytes for item in self.items)

    @property
    def by_layer(self):
        sums = dict.fromkeys(self.layers, 0)
        for item in self.items:
            sums[item.layer] = sums.get(item.layer, 0) + item.bytes
        return sums

    def __enter__(self):
        for name, layer in self.layers.items():
            for tensor in (*layer.parameters(), *layer.buffers()):
                self._known.setdefault(tensor.untyped_storage(), False)
            self._hooks += [
                layer.register_forward_pre_hook(lambda *_, name=name: self._within.append(name)),
                layer.register_forward_hook(self._leave, always_call=True),
            ]
        super().__enter__()
        return self

    def __exit__(self, *error):
        super().__exit__(*error)
        while self._hooks:
            self._hooks.pop().remove()

    def _leave(self, *_):
        self._within.pop()

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage not in self._known:
            return _Kept(self, tensor)
        if not self._known[storage]:
            self._known[storage] = True
            self.parameter_bytes += storage.nbytes()
        return tensor.detach()

    def _unpack(self, packed):
        return packed.tensor if isinstance(packed, _Kept) else packed

    def hold(self, tensor):
        storage = tensor.untyped_storage()
        users = self._users.get(id(storage), 0)
        self._users[id(storage)] = users + 1
        if not users:
            self.items.append(
                Saved(self._within[-1], tuple(tensor.shape), tensor.dtype, storage.nbytes())
            )
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)

    def release(self, tensor):
        storage = tensor.untyped_storage()
        self._users[id(storage)] -= 1
        if not self._users[id(storage)]:
            del self._users[id(storage)]
            self.held -= storage.nbytes()


class _Kept:
    """A saved tensor in autograd's graph: when the graph lets go of it, it is no longer held."""

    def __init__(self, saved, tensor):
        # Detached, because an operation's own output would hold the operation that holds it.
        self.saved, self.tensor = saved, tensor.detach()
        saved.hold(self.tensor)

    def __del__(self):
        self.saved.release(self.tensor)


def _named(layers):
    if isinstance(layers, nn.Module):
        return dict(layers.named_children()) or {type(layers).__name__: layers}
    if isinstance(layers, dict):
        return dict(layers)
    return {f"{i} {type(layer).__name__}": layer for i, layer in enumerate(layers)}
