"""Measurements: clocks, bytes on the wire, and the hardware of this machine."""

from statistics import median

from naranhi.measure.hardware import (
    caches,
    copy_seconds,
    gpus,
    link_seconds,
    parts,
    product_seconds,
    rdma_ports,
    topology,
)
from naranhi.measure.recorder import Recorder, clock_offset, write_trace
from naranhi.measure.timing import best_seconds, interleaved, unchecked_group
from naranhi.measure.traffic import wire_bytes

__all__ = [
    "Recorder",
    "best_seconds",
    "caches",
    "clock_offset",
    "copy_seconds",
    "gpus",
    "interleaved",
    "link_seconds",
    "median",
    "parts",
    "product_seconds",
    "rdma_ports",
    "topology",
    "unchecked_group",
    "wire_bytes",
    "write_trace",
]
