"""What fsdp.py and deepspeed_zero.py share: where to save a state, and how to resume from it."""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def parse(options):
    """Parse the command line, to which saving adds two options."""
    add, lr = options.add_argument, options.get_default("lr")
    add("--save", type=Path, help="a folder for the last state, on a file system all nodes share")
    add("--resume", action="store_true", help="begin with the state there; a new --lr holds")
    options.set_defaults(lr=None)  # to know whether --lr was passed
    given = options.parse_args()
    if given.resume and not given.save:
        options.error("--resume needs --save, the folder of the state to begin with")
    if given.save and given.save.is_symlink():
        given.save = given.save.resolve()  # a state can replace a folder, not a link to one
    if given.save and (given.save.resolve() == Path.cwd() or given.save.is_mount()):
        options.error(f"--save {given.save} cannot be replaced as a whole: name a folder in it")
    given.new_lr, given.lr = given.lr, lr if given.lr is None else given.lr
    return given


def check_shared(folder):
    """Exit on all ranks unless all of them see what rank 0 writes into the folder."""
    rank, seen = dist.get_rank(), [None] * dist.get_world_size()
    if rank == 0:
        os.makedirs(folder, exist_ok=True)
    mark = [Path(tempfile.mkdtemp(dir=folder)).name if rank == 0 else None]  # not in any cache
    dist.broadcast_object_list(mark)
    dist.all_gather_object(seen, Path(folder, mark[0]).exists())
    if rank == 0:
        os.rmdir(Path(folder, mark[0]))
    if not all(seen):
        unseen = f"rank {seen.index(False)} does not see what rank 0 writes to {folder}"
        sys.exit(f"--save needs a folder on a file system that all nodes share: {unseen}")


def check_new(folder):
    """Exit on all ranks unless the folder is empty or missing: a state there would be lost."""
    taken = [dist.get_rank() == 0 and folder.exists() and any(folder.iterdir())]
    dist.broadcast_object_list(taken)
    if taken[0]:
        sys.exit(f"{folder} is not empty: --resume goes on with its state; begin in another folder")


def settings(options, data):
    """Return the settings that a resume must keep, so that its rows and optimizer state fit."""
    kept = {f"--{name}": getattr(options, name) for name in ("batch", "seed", "optimizer")}
    texts = hashlib.sha256("\0".join(data["context"]).encode())
    return kept | {"texts in --data": texts.hexdigest()[:12]}


def write_settings(folder, settings):
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        Path(folder, "settings.json").write_text(json.dumps(settings))


def check_settings(folder, settings):
    """Exit unless the folder has a state, saved with the same settings."""
    file = Path(folder, "settings.json")
    if not file.exists():
        sys.exit(f"no checkpoint in {folder}")
    for name, saved in json.loads(file.read_text()).items():
        if settings[name] != saved:
            sys.exit(f"{folder} was saved with {name} {saved}, and this is {name} {settings[name]}")


def set_new_lr(optimizer, options):
    """Replace the saved learning rate by --lr, if it was passed."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] if options.new_lr is None else options.new_lr


def save(state, settings, folder):
    """Save beside the existing state, then replace it: one of the two is always complete."""
    new, old = f"{folder}.new", f"{folder}.old"
    if dist.get_rank() == 0:
        shutil.rmtree(new, ignore_errors=True)  # of a save that was killed
    write_settings(new, settings)
    dist.barrier()
    dcp.save(state, checkpoint_id=new)
    if dist.get_rank() == 0:
        if is_whole(folder):
            shutil.rmtree(old, ignore_errors=True)
            os.rename(folder, old)
        os.rename(new, folder)
        keep_others(old, folder)
        shutil.rmtree(old, ignore_errors=True)


def keep_others(old, folder):
    """Move files that somebody put beside the old state, unless the new folder has the name."""
    for path in Path(old).glob("*"):
        if path.suffix != ".distcp" and not Path(folder, path.name).exists():
            path.rename(Path(folder, path.name))


def is_whole(folder):
    return os.path.exists(f"{folder}/.metadata")  # which dcp.save writes last


def finish_save(folder):
    """If `save` was killed between its two renames, do the second, or take the first back."""
    if dist.get_rank() == 0:
        left = [path for path in (f"{folder}.new", f"{folder}.old") if is_whole(path)]
        if left and not is_whole(folder):
            os.rename(left[0], folder)
        keep_others(f"{folder}.old", folder)
    dist.barrier()
