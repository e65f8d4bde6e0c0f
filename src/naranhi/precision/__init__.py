"""Number formats of training: bits, loss scaling, stochastic rounding, fp8, overflow.

Everything here works on tensors of one process.
"""

from naranhi.precision.formats import Fields, Format, decompose, describe
from naranhi.precision.fp8 import dequantize, quantize
from naranhi.precision.loss_scaling import LossScaler
from naranhi.precision.overflow import NonFinite, first_nonfinite
from naranhi.precision.rounding import stochastic_round

__all__ = [
    "Fields",
    "Format",
    "LossScaler",
    "NonFinite",
    "decompose",
    "dequantize",
    "describe",
    "first_nonfinite",
    "quantize",
    "stochastic_round",
]
