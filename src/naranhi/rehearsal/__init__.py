"""Rehearse a plan before there is a cluster: every mesh, on paced ranks of one machine.

    machine = fit(pace, network)                      # what a layer, a message and an action cost
    forecast = planning.predict(model, machine, plan, sequence_length, global_batch)
    seconds = rehearse(model, plan, sequence_length, global_batch, pace=pace, network=network)

The layers compute and wait (`models.Paced`), the links within and between two groups of ranks are
paced, too (`distributed.links`), and all else is as in training: `Pipeline`, the functions of
tensor parallelism, ring attention, the all-reduce of gradients. Call each function on every rank.
"""

from naranhi.rehearsal.fitting import fit
from naranhi.rehearsal.layers import Attention, Pace, RehearsalLayer
from naranhi.rehearsal.meshes import Groups, meshes
from naranhi.rehearsal.network import Network
from naranhi.rehearsal.steps import rehearse

__all__ = [
    "Attention",
    "Groups",
    "Network",
    "Pace",
    "RehearsalLayer",
    "fit",
    "meshes",
    "rehearse",
]
