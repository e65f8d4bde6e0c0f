"""Train GPT-2 with transformers' Trainer: the shortest way, which decides the rest by itself.

python trainer.py                                           one device
torchrun --standalone --nproc-per-node 4 trainer.py         DistributedDataParallel
accelerate launch --num_processes 4 --use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \\
    --fsdp_transformer_layer_cls_to_wrap GPT2Block trainer.py   FSDP, on GPUs only
"""

import os
import sys

import torch
import torch.distributed as dist
from model_and_data import (
    IGNORE_INDEX,
    Collate,
    load_model,
    load_passages,
    parser,
    rows_per_rank,
)
from transformers import Trainer, TrainerCallback, TrainingArguments


class Print(TrainerCallback):
    def on_log(self, arguments, state, control, logs, **_):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step - 1}: loss {logs['loss']:.6f}", flush=True)


class Reseed(TrainerCallback):
    """The Trainer seeds all ranks alike; for dropout, draw a different mask on each."""

    def on_train_begin(self, arguments, state, control, **_):
        torch.manual_seed(arguments.seed + 1 + arguments.process_index)


def main():
    options = parser(__doc__).parse_args()
    if "WORLD_SIZE" not in os.environ and torch.cuda.device_count() > 1:
        sys.exit("the Trainer would take all GPUs by nn.DataParallel: start it with torchrun")
    model = load_model(options)
    collate = Collate(options, model.config.n_positions)
    data = load_passages(options)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(options.seed))

    def with_labels(rows):  # the model's loss shifts labels by itself
        batch = collate(rows)
        batch.pop("targets")
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORE_INDEX)
        batch["labels"][:, 0] = IGNORE_INDEX  # nothing predicts it; the Trainer counts it
        return batch

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    Trainer(
        model,
        TrainingArguments(
            output_dir="trainer",
            max_steps=options.steps,
            learning_rate=options.lr,
            seed=options.seed,
            per_device_train_batch_size=rows_per_rank(options, ranks),
            lr_scheduler_type="constant",
            optim={"adamw": "adamw_torch", "sgd": "sgd"}[options.optimizer],
            weight_decay=0.01 if options.optimizer == "adamw" else 0.0,
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            remove_unused_columns=False,
            disable_tqdm=True,
            dataloader_drop_last=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        data_collator=with_labels,
        train_dataset=data.select(order),
        callbacks=[Print(), Reseed()],
    ).train()
    if dist.is_initialized():  # the Trainer leaves the group, whose threads may abort the exit
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
