"""Save the state of a sharded training, and load it on another number of ranks.

A checkpoint is a folder with one file from each rank, which holds the rank's shards, and a
manifest, `manifest.json`. The manifest is written last and replaced atomically, and files are named
after their digests: a save that is interrupted leaves the previous checkpoint intact. All ranks
must see the same folder.

A shard is a slice of a flat parameter (`flat_param.FlatParam`), and so is what an element-wise
optimizer keeps for it. On another number of ranks the flat parameter is cut elsewhere, and each
rank assembles its shard from the files that hold a part of it.
"""

from __future__ import annotations

import json
import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from naranhi.distributed import from_all_ranks, raise_on_all
from naranhi.zero import checkpoint_files
from naranhi.zero.checkpoint_files import StateError
from naranhi.zero.flat_param import shard_size

if TYPE_CHECKING:
    from naranhi.zero.zero import Zero

FORMAT = 1


def save(zero: Zero, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer) -> None:
    """Write the state of a `zero.Zero` and its optimizer; every rank calls it, between steps.

    It deletes the files of earlier saves, and touches nothing else in the folder.

    Args:
        zero: The sharded model.
        folder: The same folder for all ranks; created if it does not exist.
        optimizer: The optimizer of its shards.

    Raises:
        StateError: On every rank, if any rank cannot write, has a state that `load` could not read,
            or finds a manifest that `save` did not write. What was saved there before stays.
    """
    folder = Path(folder)
    file = raise_on_all(lambda: _write_shards(zero, folder, optimizer), zero.group, kind=StateError)
    files = from_all_ranks(file, zero.group)
    # No rank continues before the state is saved.
    raise_on_all(
        lambda: _write_manifest(zero, folder, optimizer, files), zero.group, kind=StateError
    )


def _write_shards(zero, folder, optimizer):
    """Write this rank's file; return its name and digest."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint_files.require_own(folder / "manifest.json")
    rank, flats = dist.get_rank(zero.group), _flats(zero)
    content = {
        "masters": [_copy(flat.master[: _used(flat)]) for flat in flats],
        "states": [
            {number: _state(optimizer, piece) for number, piece in flat.pieces.items()}
            for flat in flats
        ],
        "options": [_options(group) for group in optimizer.param_groups],
        "buffers": [_copy(buffer) for buffer in zero.model.buffers()] if rank == 0 else None,
    }
    return checkpoint_files.write_shards(folder, rank, content)


def _write_manifest(zero, folder, optimizer, files):
    """Write the manifest of all ranks' files on rank 0, and delete the files of other saves."""
    if dist.get_rank(zero.group) == 0:
        manifest = {
            "format": FORMAT,
            "model": _layout(zero),
            "files": files,
            "optimizer": _kind(optimizer),
        }
        checkpoint_files.write(folder / "manifest.json", json.dumps(manifest, indent=1).encode())
        keep = {file["name"] for file in files}
        for old in folder.iterdir():
            if checkpoint_files.OWN.fullmatch(old.name) and old.name not in keep and old.is_file():
                old.unlink()


def load(zero: Zero, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer) -> None:
    """Read what `save` has written into a `zero.Zero` of the same model, and its optimizer.

    Args:
        zero: The sharded model, on any number of ranks.
        folder: The folder of the save.
        optimizer: The optimizer of its shards.

    Raises:
        StateError: On every rank, before anything is changed on any, if the state is of another
            model, other units or groups, or another optimizer, or if a file is missing or not as
            written.
    """
    masters, states, options, buffers = raise_on_all(
        lambda: _read(zero, Path(folder), optimizer), zero.group, kind=StateError
    )
    zero.zero_grad()
    flats = _flats(zero)
    number_of = {
        shard: i
        for i, shard in enumerate(
            chain.from_iterable(group["params"] for group in optimizer.param_groups)
        )
    }
    optimizer.load_state_dict(
        {
            "state": {
                number_of[piece]: state[group]
                for flat, state in zip(flats, states, strict=True)
                for group, piece in flat.pieces.items()
                if state[group]
            },
            "param_groups": [
                {**option, "params": [number_of[shard] for shard in group["params"]]}
                for option, group in zip(options, optimizer.param_groups, strict=True)
            ],
        }
    )
    for flat, master in zip(flats, masters, strict=True):
        flat.master[: len(master)].copy_(master)
    for buffer, saved in zip(zero.model.buffers(), buffers, strict=True):
        buffer.copy_(saved)
    zero.refresh(flats)  # frozen parameters, too


def _read(zero, folder, optimizer):
    """Return the state that this rank is to have: (masters, states, options, buffers)."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        version, saved, kind = manifest["format"], manifest["model"], manifest["optimizer"]
        files = [(folder / Path(file["name"]).name, file["sha256"]) for file in manifest["files"]]
    except FileNotFoundError:
        raise StateError(
            f"{folder} has no manifest.json: nothing was saved there, or not to the end"
        ) from None
    except OSError as error:
        raise StateError(f"{folder / 'manifest.json'} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{folder / 'manifest.json'} cannot be read: {error}") from error
    if version != FORMAT:
        raise StateError(f"{folder} has a state of format {version}, this is format {FORMAT}")
    _compare(saved, _layout(zero))
    own_kind = _kind(optimizer)
    if kind != own_kind:
        raise StateError(f"the state is of {kind}, not of {own_kind}")

    flats = _flats(zero)
    masters = [torch.zeros_like(flat.master[: _used(flat)]) for flat in flats]
    states = [{number: {} for number in flat.pieces} for flat in flats]
    ranks, options, buffers = len(files), None, None
    for rank, file in enumerate(files):
        content = checkpoint_files.read(*file)
        if rank == 0:
            options, buffers = content["options"], content["buffers"]
        for i, flat in enumerate(flats):
            start = rank * shard_size(flat.length, ranks)
            _overlay(masters[i], flat.shard_slice.start, content["masters"][i], start)
            for number, there in content["states"][i].items():
                first, own = flat.starts[number], flat.pieces[number]
                for key, value in there.items():
                    if not (torch.is_tensor(value) and value.dim()):
                        states[i][number][key] = value
                        continue
                    if key not in states[i][number]:
                        states[i][number][key] = torch.zeros(len(own), dtype=value.dtype)
                    _overlay(
                        states[i][number][key],
                        max(first, flat.shard_slice.start),
                        value,
                        max(first, start),
                    )
    return masters, states, options, buffers


def _overlay(target, target_start, source, source_start):
    """Copy the overlap of two slices of a flat parameter, each given with its start there."""
    first = max(target_start, source_start)
    last = min(target_start + len(target), source_start + len(source))
    if first < last:
        target[first - target_start : last - target_start].copy_(
            source[first - source_start : last - source_start]
        )


def _layout(zero):
    """Return what must be equal in the saved model: flat parameters, their shapes, buffers."""
    layout = {}
    for unit in zero.units:
        for flat in unit.flats:
            for name, shape, param in zip(flat.names, flat.shapes, flat.parameters, strict=True):
                layout[f"parameter {name}"] = {
                    "unit": unit.name,
                    "dtype": str(flat.master.dtype),
                    "shape": list(shape),
                    "group": flat.group_of.get(param),
                }
    for name, buffer in zero.model.named_buffers():
        layout[f"buffer {name}"] = {"shape": list(buffer.shape), "dtype": str(buffer.dtype)}
    return layout


def _compare(saved, own):
    """Raise StateError, naming the first difference."""
    for name in {**saved, **own}:
        if name not in saved or name not in own:
            raise StateError(f"the {'model' if name in saved else 'state'} has no {name}")
        for what, value in own[name].items():
            if saved[name].get(what) != value:
                raise StateError(
                    f"{name} has {what} {saved[name].get(what)} in the state and {value} in "
                    "the model"
                )
    if list(saved) != list(own):
        raise StateError("the state has its parameters in another order than the model")


def _flats(zero):
    return [flat for unit in zero.units for flat in unit.flats]


def _used(flat):
    """Return how many elements of a shard lie before the end of the flat parameter."""
    return min(max(flat.length - flat.shard_slice.start, 0), flat.size)


def _state(optimizer, piece):
    """Return what the optimizer keeps for a shard, per element or for the shard as a whole."""
    state = optimizer.state.get(piece, {})
    for key, value in state.items():
        if torch.is_tensor(value) and value.dim() and value.shape != piece.shape:
            raise StateError(
                f"{type(optimizer).__name__} keeps {key} of shape {tuple(value.shape)} "
                f"for {len(piece)} numbers: it is not element-wise"
            )
    return {key: _copy(value) if torch.is_tensor(value) else value for key, value in state.items()}


def _kind(optimizer):
    groups = len(optimizer.param_groups)
    return f"{type(optimizer).__name__} with {groups} parameter group{'s' * (groups != 1)}"


def _options(group):
    return {key: value for key, value in group.items() if key != "params"}


def _copy(tensor):
    """Copy a tensor without the rest of its storage, which would be written too."""
    return tensor.detach().clone()
