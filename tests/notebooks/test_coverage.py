"""What the book's sources teach, and the check of a chapter that fails if it is not so.

Each check was seen to fail, by breaking what it checks. One that is renamed or moved is to be
changed here as well; one that is taken away leaves something of the sources unshown.
"""

import json
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CHECKS = """
GPT-2 on four stages, beside torchgpipe | 06_gpipe
    tied                  embedding and head are one parameter
    loss-curve            at first all tokens are about equally likely: ln 1024
    apart                 taken apart, the model computes the same logits
    beside                30 steps of SGD: our losses are torchgpipe's
    errata-tie            a cloned head adds the whole table, 50,257 × 768
    errata-padding-share  padded to the longest: a quarter of the targets is padding
    errata-order-check    sorted by length: fewer than three as well
    errata-block-zero     3 rows go in, one row without a batch comes out
    errata-mask-check     without a mask, the logits of real tokens are the same
Batches by length | 06_gpipe
    by-length             by length: less padding than a tenth of the text
ReLU: what it keeps, and its slope at 0 | 07_activation_memory
    errata-relu           it keeps its input
    errata-relu           at exactly 0 it lets the gradient pass; torch's ReLU and ours do not
DeepSpeed's pipeline engine | 08_one_f_one_b
    deepspeed-schedule    DeepSpeed's order is 1F1B, on every rank
    deepspeed-methods     type:GPT2Block cuts 4/3/3/4
    beside                20 steps of SGD: our losses are DeepSpeed's
    errata-microbatches   without a micro-batch size there is one micro-batch
    errata-loader         one entry without a micro-batch size, eight with one
DataParallel loads its root more; DDP does not | 11_data_parallel
    root-check            every rank sends the predicted bytes
    ddp-construct         construction made them equal
    ddp-buffers           no backward yet, and all ranks have rank 0's mean
Single operations, several architectures | 18_deepspeed
    report-check          pip has built none of the operations
    extra                 transformers[deepspeed] adds accelerate
    build-variables       the variables of the commands are the builders' own
    arch-def              one kind of GPU
    arch-flags            6.1;8.6: machine code for both
initialize, its arguments and its four results | 18_deepspeed
    arguments             --deepspeed is a switch
    four                  the process group is the one that was there
    four                  the loader's batches are micro-batches
    parameters            not among model_parameters: the first layer stays
    given-optimizer       an optimizer that is passed replaces the one of the configuration
    schedule              the rates of five steps
    loader                after set_epoch it does not
Forward, backward and step of the engine | 18_deepspeed
    boundary-table        a boundary at every third micro-batch
    divided               backward has divided the loss by three
    sent-check            : predicted
    stages-table          : the losses of one process
Saving and loading, with client state | 18_deepspeed
    resume                step 4, done twice: the same loss
    files                 the optimizer's state: a file for each rank
    bits                  stopped and resumed: the same losses, to the bit
    interval              `if step % interval == 0` saves the fifth and the tenth
    interval              `enumerate(rows[done:], done)` continues it
    tags-read             four folders, each with the optimizer state of one rank
    other                 `client_sd` raises a TypeError
    other                 every rank gets the client_state of rank 0
    universal-check       begun on two ranks, continued on four: the losses of one process
The configuration, and the launcher's options | 18_deepspeed
    sizes-table           : batch = micro-batch × accumulation × 4 ranks
    clip                  no key: clipped to a norm of 1
    silent                a misspelt section is ignored: no ZeRO
    wrong-ranks           an optimizer that DeepSpeed does not know is refused
    wrong-ranks           fp16 is refused on CPUs without instructions for it
    wrong-ranks           a configuration in args and another in config are refused
    log-check             each rank is told its place twice: LOCAL_RANK and an argument
    options-check         no option: all devices
    options-check         CUDA_VISIBLE_DEVICES alone is honoured
    options-check         together with --include it is ignored: one rank, on the slot named
    include               a host without slots means all of its slots
    dash                  the option has become the script
    hostfile              the second node has ranks 2 and 3 of four
Without the launcher | 18_deepspeed
    slurm                 eight tasks, each of them the script itself
The pipeline's own figures | 18_deepspeed
    pipe-counts           the stages have 4, 3, 3 and 4 layers
    pipe-counts           TOTAL_PARAMS counts the tied layer twice
    pipe-counts           UNIQUE_PARAMS counts it once
    pipe-print            steps_per_print 2: rank 0 prints every second step
    pipe-zero             with a pipeline is refused
fp16 overflows, and what cures it | 19_precision
    t5-run-2              fp16: NaN
    t5-figure-2           in fp16 the first output that is not finite is that of 3.wo
    scaler-fails-2        the scale is halved in every step
    cures-table-2         each cure: the logits of fp32, within 1%
    underflow-table-2     in fp16 more than half of them are
    scaler-compare        every scale and every skipped step as torch's
    agree-check           after the all-reduce every rank skips
"""


def rows():
    item = chapter = None
    for line in CHECKS.strip().splitlines():
        if line.startswith(" "):
            cell, words = line.split(maxsplit=1)
            yield pytest.param(chapter, cell, words, id=f"{item}: {words}")
        else:
            item, chapter = line.split(" | ")


@pytest.mark.parametrize("chapter, cell, words", [*rows()])
def test_a_check_says_it(chapter, cell, words):
    notebook = json.loads((NOTEBOOKS / "en" / f"{chapter}.ipynb").read_text())
    sources = {c["id"]: "".join(c["source"]) for c in notebook["cells"]}
    assert "check." in sources[cell]
    assert words in sources[cell]
