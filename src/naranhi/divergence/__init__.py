"""Find the first place where a parallel model diverges from one process.

    reference = trace(model, run)                        # one process: what every layer computes
    report = find(parallel, run, reference, mesh=mesh)   # the same step on the ranks
    print(report)      # "3.block.mlp.c_fc, forward, micro-batch 0: rank 1 (tensor 1) differs ..."

`recorder` hooks layers; `reference` has the tensors of one process and their rounding errors, from
which `tolerance` derives bounds; `axes` and `models` know which part of a tensor a rank holds;
`requirements` checks the ranks' models; `finder` compares, phase by phase (`data` for the batch,
`random` for masks); `classify` and `report` describe the difference in words.

`gallery` has silent bugs, each in its smallest form, for the finder to find.
"""

from naranhi.divergence.finder import find
from naranhi.divergence.reference import Reference, trace
from naranhi.divergence.report import Divergence, Report
from naranhi.divergence.tolerance import TOLERANCE

__all__ = ["TOLERANCE", "Divergence", "Reference", "Report", "find", "trace"]
