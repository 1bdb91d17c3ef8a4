"""Tokens a second of ``generate`` over a pipeline of 2 ranks, next to one process and to transformers' several devices.

    torchrun --nproc-per-node 2 benchmarks/generation.py [--layers 12 --width 512 --rows 8 --new 32]

Each process has one thread. A batch of ``--rows`` prompts of 64 tokens gets ``--new`` tokens, greedily:

- one process;
- ``device_map``: the layers of one process on two devices, as ``from_pretrained(device_map="auto")`` spreads them. One
  device works at a time. On the CPU both devices are the CPU, so this shows the cost of accelerate's hooks, and an
  upper bound of what two equal devices reach for one batch;
- the pipeline, with the rows as one batch (also one stage at a time), and in parts that keep both stages busy.

All have the same tokens, which is asserted. The fastest of three runs counts.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import NxDPPModel, parallel_state

_PROMPT = 64
_RUNS = 3


def main() -> None:
    """Print a table on rank 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (("layers", 12), ("width", 512), ("rows", 8), ("new", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    sizes = parser.parse_args()
    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    ids = torch.randint(3, 8000, (sizes.rows, _PROMPT), generator=torch.Generator().manual_seed(0))
    given = {"max_new_tokens": sizes.new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    rows: dict[str, tuple[float, torch.Tensor]] = {}
    if dist.get_rank() == 1:
        # The driver: the other one waits, so one core is free of work as with one process.
        rows["one process"] = _timed(lambda: _model(sizes).generate, ids, given)
        rows["device_map, two devices in turn"] = _timed(lambda: _dispatched(sizes).generate, ids, given)
    dist.barrier()
    model = NxDPPModel(_model(sizes)).eval()
    for parts in (1, 2, 4):
        if sizes.rows % parts == 0:
            rows[f"pipeline, {parts} at a time"] = _timed(
                lambda: model.generate, ids, {**given, "num_microbatches": parts}
            )
    if dist.get_rank() == 1:
        base, tokens = rows["one process"]
        for name, (seconds, found) in rows.items():
            assert torch.equal(found, tokens), f"{name} has other tokens"
            print(f"{name:34}{sizes.rows * sizes.new / seconds:8.0f} tokens/s{base / seconds:7.2f} of one process")
    dist.destroy_process_group()


def _model(sizes: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=sizes.width,
        intermediate_size=4 * sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=8,
    )
    return LlamaForCausalLM(config).eval()


def _dispatched(sizes: argparse.Namespace) -> Any:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = _model(sizes)
    for module in model.modules():
        if not list(module.children()) and list(module.parameters()):
            add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=True))
    return model


def _timed(
    make: Callable[[], Callable[..., torch.Tensor]], ids: torch.Tensor, given: dict[str, Any]
) -> tuple[float, torch.Tensor]:
    """Seconds of the fastest run, and its tokens; the first run is not counted."""
    generate = make()
    tokens, seconds = generate(ids, **given), float("inf")
    for _ in range(_RUNS):
        start = time.perf_counter()
        tokens = generate(ids, **given)
        seconds = min(seconds, time.perf_counter() - start)
    return seconds, tokens


if __name__ == "__main__":
    main()
