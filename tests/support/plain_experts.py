"""A mixture of experts in one process, written another way: every expert, token by token."""

import torch
from torch.nn import functional as F


def mixture(tokens, router, up, down, top_k, capacity=None):
    """(output, auxiliary loss, which (token, choice) were dropped) of all the step's tokens."""
    probabilities = (tokens @ router.t()).softmax(-1)
    total = len(router)
    outputs, chosen = [torch.zeros_like(row) for row in tokens], [0] * total
    picked = [row.sort(descending=True, stable=True) for row in probabilities]
    taken, dropped = [0] * total, set()
    for choice in range(top_k):
        for token, (values, experts) in enumerate(picked):
            expert = experts[choice].item()
            chosen[expert] += 1
            if capacity is not None and taken[expert] == capacity:
                dropped.add((token, choice))
                continue
            taken[expert] += 1
            gate = values[choice] / (values[:top_k].sum() if top_k > 1 else 1)
            result = F.gelu(tokens[token] @ up[expert]) @ down[expert]
            outputs[token] = outputs[token] + gate * result
    tokens_in_all = max(len(tokens), 1)
    auxiliary = sum(
        chosen[expert] / (top_k * tokens_in_all) * probabilities[:, expert].sum() / tokens_in_all
        for expert in range(total)
    )
    output = torch.stack(outputs) if outputs else tokens * 1
    return output, total * auxiliary, dropped
