"""Control what a backward saves, recomputes or defers, in one process."""

from naranhi.autograd.functions import Dropout, FunctionLayer, MaskedReLU, MaxPool2d, ReLU
from naranhi.autograd.recomputation import Recompute, recompute
from naranhi.autograd.saved_tensors import Saved, SavedTensors
from naranhi.autograd.split_backward import Splittable
from naranhi.autograd.splitting import splittable

__all__ = [
    "Dropout",
    "FunctionLayer",
    "MaskedReLU",
    "MaxPool2d",
    "ReLU",
    "Recompute",
    "Saved",
    "SavedTensors",
    "Splittable",
    "recompute",
    "splittable",
]
