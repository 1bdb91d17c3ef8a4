"""What a new shape costs: the stages describing values to each other, or one pass over fake tensors.

    torchrun --nproc-per-node 4 benchmarks/new_shapes.py

A pipeline of four stages is given batches of a new sequence length each step, and the same length again. The
first costs what the stages tell each other along with the first microbatch; beside it, what one pass of the
whole model over fake tensors takes, from which every rank could know all shapes without being told.
"""

import statistics
import time

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import NxDPPModel, parallel_state

STEPS = 30
LAYERS = 16


def main() -> None:
    """Measure on all ranks and print on the first."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=4)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=LAYERS
    )
    model = NxDPPModel(LlamaForCausalLM(config), num_microbatches=4)
    new, known = [], []
    for length in range(8, 8 + STEPS):
        new.append(step_seconds(model, length))
        known.append(step_seconds(model, length))
    added = [a - b for a, b in zip(new[5:], known[5:], strict=True)]
    fake = [fake_pass_seconds(config, length) for length in range(8, 8 + STEPS)][5:]
    if dist.get_rank() == 0:
        table = Table("a new shape costs", "median ms", "quartiles", title=f"{LAYERS} layers, 4 stages")
        for name, seconds in (("descriptions on the wire", added), ("one pass over fake tensors", fake)):
            low, middle, high = (1000 * value for value in statistics.quantiles(seconds, n=4))
            table.add_row(name, f"{middle:.2f}", f"{low:.2f} to {high:.2f}")
        Console().print(table)
    parallel_state.destroy_model_parallel()


def step_seconds(model: NxDPPModel, length: int) -> float:
    """Wall time of one step, over all ranks together."""
    ids = torch.randint(0, 64, (4, length))
    dist.barrier()
    started = time.perf_counter()
    model.run_train(input_ids=ids, labels=ids)
    dist.barrier()
    return time.perf_counter() - started


def fake_pass_seconds(config: LlamaConfig, length: int) -> float:
    """Wall time of one forward of the whole model on fake tensors, on one rank while the others do the same."""
    with FakeTensorMode():
        model = LlamaForCausalLM(config)
        ids = torch.zeros(1, length, dtype=torch.int64)
        started = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False)
        return time.perf_counter() - started


main()
