"""Under torchrun, on two hosts: forecast every mesh, then run it; rank 0 writes both as JSON."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from naranhi.planning import Model, predict
from naranhi.rehearsal import Network, Pace, fit, meshes, rehearse

MODEL, TOKENS, PACE = Model(4, 64, 8, vocabulary=1), 64, Pace(0.08, 0.16)
LINKS = Network((0.0, 0.0), (0.0, 0.0))  # no delay besides that of the cable


def run(plan):
    """The seconds of its fastest step, which all ranks know."""
    ranks = dist.get_world_size()
    return rehearse(MODEL, plan, TOKENS, ranks, pace=PACE, network=LINKS)


def main(file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    machine = fit(MODEL, TOKENS, pace=PACE, network=LINKS)
    forecasts = {
        plan: predict(MODEL, machine, plan, TOKENS, ranks).step_seconds
        for plan in meshes(ranks, MODEL.layers)
    }
    chosen = [min(forecasts, key=forecasts.get)]
    dist.broadcast_object_list(chosen)  # each rank has fitted what it measured
    measured = {plan: run(plan) for plan in forecasts}
    # Whatever else runs here only adds time: those in question run again.
    fastest = min(measured.values())
    for plan in [one for one in measured if one == chosen[0] or measured[one] < 1.1 * fastest]:
        measured[plan] = min(measured[plan], run(plan), run(plan))
    result = [
        (f"d{plan.dp} p{plan.pp} c{plan.cp} t{plan.tp}", forecasts[plan], measured[plan])
        for plan in measured
    ]
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps({"far": machine.far, "meshes": result}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
