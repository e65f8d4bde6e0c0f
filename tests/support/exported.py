"""Trainings that are refused or export, and what transformers makes of an export."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from naranhi import train


def run(arguments):
    """On a rank: losses and what rank 0 says; what a user is told, if it is refused."""
    said = []
    try:
        losses = train.train(train.parse([str(word) for word in arguments]), say=said.append)
    except train.UsageError as error:
        return str(error)
    return losses, said


def loss_of(folder, file):
    """By transformers alone: the loss of a passage."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = AutoTokenizer.from_pretrained(folder)(file, return_tensors="pt").input_ids[:, :24]
    with torch.no_grad():
        return model(tokens, labels=tokens).loss.item()
