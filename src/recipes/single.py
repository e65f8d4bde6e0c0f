"""Train GPT-2 on one device: the script that the other recipes distribute.

python single.py                     a small GPT-2 with random weights, and the book's own text
python single.py --model gpt2 --data rajpurkar/squad --lr 3e-5    both from the Hugging Face hub
"""

import torch
from model_and_data import (
    IGNORE_INDEX,
    Collate,
    load_model,
    load_passages,
    make_optimizer,
    parser,
    summed_loss,
)
from torch.utils.data import DataLoader, RandomSampler


def main():
    options = parser(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(options).to(device)
    data = load_passages(options)
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(options.seed))
    loader = DataLoader(
        data,
        options.batch,
        sampler=sampler,
        drop_last=True,
        num_workers=1,
        collate_fn=Collate(options, model.config.n_positions),
    )
    optimizer = make_optimizer(options, model.parameters())

    for step, batch in zip(range(options.steps), loader, strict=False):
        batch = batch.to(device)
        count = (batch["targets"] != IGNORE_INDEX).sum()
        loss = summed_loss(model, batch) / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
