"""Find the first place where a parallel model parts from one process.

    reference = trace(model, run)                        # one process: what every layer computes
    report = find(parallel, run, reference, mesh=mesh)   # the same step on the ranks
    print(report)      # "3.block.mlp.c_fc, forward, micro-batch 0: rank 1 (tensor 1) differs ..."

`recorder` hooks layers; `reference` says what one process computes and how exactly, which is where
the tolerance comes from; `axes` and `models` know which part of it a rank holds; `finder` compares,
phase by phase (`data` for the batch, `random` for masks), what `requirements` lets through;
`classify` and `report` put it in words.

`gallery` has bugs that make no noise, each as small as it can be, for the finder to find.
"""

from naranhi.divergence.finder import find
from naranhi.divergence.reference import Reference, trace
from naranhi.divergence.report import Divergence, Report
from naranhi.divergence.tolerance import TOLERANCE

__all__ = ["TOLERANCE", "Divergence", "Reference", "Report", "find", "trace"]
