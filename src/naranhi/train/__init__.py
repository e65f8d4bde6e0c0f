"""GPT-2 on a mesh of ranks: ``torchrun ... -m naranhi.train``."""

from naranhi.train.cli import losses, parse, train
from naranhi.train.trainer import Mistake, Training

__all__ = ["Mistake", "Training", "losses", "parse", "train"]
