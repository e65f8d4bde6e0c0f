"""Run ``python -m naranhi.train``, as `torchrun` does on every rank."""

from naranhi.train.cli import main

main()
