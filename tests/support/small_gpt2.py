"""A GPT-2 of two blocks in a folder, and a corpus of 16 passages, both in the form of real ones."""

import small_corpus
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from naranhi import data


def write(folder, extra=0, positions=32):
    """Write them; the options of `naranhi.train` that name them. `extra` words have no token."""
    tokenizer = data.tokenizer()
    tokenizer.save_pretrained(folder)
    config = GPT2Config(
        vocab_size=len(tokenizer) + extra,
        n_positions=positions,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng():  # the same weights, whatever has been drawn before
        torch.manual_seed(0)
        GPT2LMHeadModel(config).save_pretrained(folder)
    return ["--model", str(folder), *small_corpus.write(folder)]
