"""One rank process of a World, as the notebook knows it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Member:
    """Describe one rank process: its host, its ipyparallel id, its place among the host's ranks."""

    host: str
    node: str  # Slurm's name of the host, or its host name
    pid: int
    task: int
    step: str
    gpus: int
    cores: int
    engine: int
    local_rank: int = 0
    gpu: int = 0  # index among the GPUs that the process sees
    threads: int = 1
    shown: tuple[int, int] = (0, 0)  # bytes of its stdout and stderr that the notebook has shown

    @property
    def who(self) -> tuple[str, int]:
        """Return the (host, pid) by which `lifeline` knows the process."""
        return self.host, self.pid
