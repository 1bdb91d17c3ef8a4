"""OSLO's tutorial of tensor model and data parallelism, from its first to its last step, without a download.

torchrun --nproc-per-node 4 examples/oslo/tutorial.py --tensor-parallel-size 2

The numbers are the tutorial's sections.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from text import texts
from tokenizer import VOCABULARY, train_tokenizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

import nxdpp.oslo as oslo
from nxdpp import parallel_state

# 2.1. Initialize some variables
BATCH_SIZE = 4
SEQ_LEN = 64
SAVE_INTERVAL = 50
TRAIN_STEP = 100


def make_model(seed: int) -> Any:
    """Return a GPT-2 of random weights, in evaluation mode, as ``from_pretrained`` returns it: without dropout."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": SEQ_LEN, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()


def make_data(steps: int) -> tuple[list[str], Any]:
    """Return the texts of ``steps`` steps of one replica, and the tokenizer."""
    datasets = texts(steps * BATCH_SIZE)
    tokenizer = train_tokenizer(texts(100))
    # Add pad token for batch training (GPT2 tokenizer doesn't have pad token)
    tokenizer.pad_token = tokenizer.eos_token
    return datasets, tokenizer


def make_batch(tokenizer: Any, batch: list[str]) -> Any:
    """Return the inputs (B, T) of a step."""
    return tokenizer(batch, return_tensors="pt", padding=True, truncation=True, max_length=SEQ_LEN)


def train(args: argparse.Namespace) -> list[float]:
    """Section 2: train, and save the parallelized model; return this replica's loss of each step."""
    # 2.2. Create model and optimizer and tokenizer
    model = make_model(args.seed)
    optimizer = Adam(model.parameters(), lr=args.learning_rate)
    datasets, tokenizer = make_data(args.steps)

    # 2.3. Parallelize the model
    model = oslo.initialize(model, config=config(args))
    device = parallel_state.local_device()

    # 2.4. Make the model data parallelizable
    on_cuda: dict[str, Any] = {"device_ids": [device], "output_device": device} if device.type == "cuda" else {}
    engine = DistributedDataParallel(module=model, process_group=model.mpu.get_data_parallel_group(), **on_cuda)

    # 2.5, 2.6. Load dataset, and create DistributedSampler to parallelize dataset
    sampler: DistributedSampler[str] = DistributedSampler(
        datasets,  # type: ignore[arg-type]  # a list is a dataset
        shuffle=True,
        num_replicas=model.mpu.get_data_parallel_world_size(),
        rank=model.mpu.get_data_parallel_rank(),
    )

    # 2.7. Create the dataloader with sampler
    dataloader: DataLoader[str] = DataLoader(
        datasets,  # type: ignore[arg-type]  # a list is a dataset
        batch_size=BATCH_SIZE,
        shuffle=False,
        sampler=sampler,
    )

    # 2.8. Do training as usual
    losses = []
    for step, batch in enumerate(dataloader):
        optimizer.zero_grad()
        input_batch = make_batch(tokenizer, batch).to(device)
        loss = engine(**input_batch, labels=input_batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % args.save_interval == 0:
            model.save_parallelized(save_directory=args.output / "parallel_ckpt")
        if step > args.steps:
            break
    # The tutorial merges what it saved last.
    model.save_parallelized(save_directory=args.output / "parallel_ckpt")
    return losses


def merge(args: argparse.Namespace) -> None:
    """Section 3: load the parallelized checkpoint into a new model, and write it merged."""
    # 3.1. Create model: with different random weights
    model = make_model(args.seed + 1)
    # 3.2. Parallelize the model
    model = oslo.initialize(model, config=config(args))
    # 3.3. Load parallelized checkpoints
    model = model.from_parallelized(args.output / "parallel_ckpt")
    # 3.4. Merge parallelized checkpoints
    model.save_parallelized(args.output / "merged_ckpt", merge_checkpoints=True)


def config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of ``oslo.initialize``."""
    return {"model_parallelism": {"enable": True, "tensor_parallel_size": args.tensor_parallel_size}}


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--steps", type=int, default=TRAIN_STEP, help="steps of one replica over all texts")
    parser.add_argument("--save-interval", type=int, default=SAVE_INTERVAL, help="steps between two saves")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of Adam; the tutorial fine-tunes with 3e-5")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--local-rank", type=int, help="given by torch.distributed.launch; LOCAL_RANK has it too")
    parser.add_argument("--output", type=Path, default=Path("runs/oslo"), help="folder of the checkpoints")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, merge, and return this replica's losses."""
    args = read_arguments(arguments)
    losses = train(args)
    merge(args)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}; merged into {args.output}/merged_ckpt")
    return losses


if __name__ == "__main__":
    main()
    parallel_state.destroy_model_parallel()
