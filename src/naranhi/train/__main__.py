"""``python -m naranhi.train``, which `torchrun` runs on every rank."""

from naranhi.train.cli import main

main()
