"""Attention of one process, written out: scores, a mask, a softmax."""

import torch

BATCH, HEADS, SIZE = 2, 12, 4


def tensors(length, kv_heads, dtype=torch.float64, seed=0):
    """Queries, keys, values, and a gradient of the output, of the whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(BATCH, heads, length, SIZE, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (HEADS, kv_heads, kv_heads, HEADS)
    ]


def mask(length, causal, documents):
    """(rows or 1, 1, length, length): which keys a query sees."""
    rows = [[length]] if documents is None else documents
    rows = [rows] if isinstance(rows[0], int) else rows
    ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])
    seen = ids[:, None, :, None] == ids[:, None, None, :]
    return seen.tril() if causal else seen


def attention(query, key, value, seen):
    """The output."""
    heads = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(heads, 1).mT / query.shape[-1] ** 0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(heads, 1)


def results(query, key, value, to_output, seen):
    """The output, and the gradients of queries, keys and values."""
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    output = attention(*leaves, seen)
    return [output.detach(), *torch.autograd.grad(output, leaves, to_output)]
