"""Train GPT-2, Llama or a relative on a mesh of ranks: ``torchrun ... -m naranhi.train``."""

from naranhi.train.cli import losses, train
from naranhi.train.options import parse
from naranhi.train.trainer import Training
from naranhi.train.usage import UsageError

__all__ = ["Training", "UsageError", "losses", "parse", "train"]
