"""Texts, tokens and batches."""

from naranhi.data.batches import (
    Batch,
    at_random,
    by_length,
    collate,
    encode,
    padding,
    stream,
    unigram_entropy,
)
from naranhi.data.corpus import contexts, tokenizer, unique

__all__ = [
    "Batch",
    "at_random",
    "by_length",
    "collate",
    "contexts",
    "encode",
    "padding",
    "stream",
    "tokenizer",
    "unigram_entropy",
    "unique",
]
