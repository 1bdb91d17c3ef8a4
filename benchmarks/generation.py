"""Tokens a second of ``generate`` over a pipeline of 2 ranks, next to one process and to transformers' several devices.

    torchrun --nproc-per-node 2 benchmarks/generation.py [--layers 12 --width 512 --rows 8 --new 32 --batches 4]

Each process has one thread. Batches of ``--rows`` prompts of 64 tokens get ``--new`` tokens a row, greedily:

- one process, one batch after the other;
- ``device_map``: the same with the hooks of accelerate around each module, which spread a model over devices
  (``from_pretrained(device_map="auto")``). One device works at a time. On the CPU all devices are the CPU, so this is
  an upper bound of what two equal devices reach in that way;
- the pipeline with one batch after the other: one stage works at a time, too;
- the pipeline with all batches at once, which keeps both stages busy.

Equal tokens are asserted. The fastest of three runs counts. A forward of few rows takes the time in which it reads the
weights, so parts of one batch (``num_microbatches``) are no faster than the batch; more batches are.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
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
    for name, default in (("layers", 12), ("width", 512), ("rows", 8), ("new", 32), ("batches", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    sizes = parser.parse_args()
    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(3, 8000, (sizes.rows, _PROMPT), generator=generator) for _ in range(sizes.batches)]
    given = {"max_new_tokens": sizes.new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    rows: dict[str, tuple[float, list[torch.Tensor]]] = {}
    if dist.get_rank() == 1:
        # The driver of the pipeline. The other rank waits without work.
        for name, model in (("one process", _model(sizes)), ("device_map, two devices in turn", _dispatched(sizes))):
            rows[name] = _timed(partial(_in_turn, model, batches, given))
    dist.barrier()
    model = NxDPPModel(_model(sizes)).eval()
    rows["pipeline, batches in turn"] = _timed(partial(_in_turn, model, batches, given))
    rows["pipeline, batches at once"] = _timed(lambda: model.generate([{"input_ids": ids} for ids in batches], **given))
    if dist.get_rank() == 1:
        base, tokens = rows["one process"]
        for name, (seconds, found) in rows.items():
            assert all(map(torch.equal, found, tokens)), f"{name} has other tokens"
            number = sizes.batches * sizes.rows * sizes.new
            print(f"{name:34}{number / seconds:8.0f} tokens/s{base / seconds:7.2f} of one process")
    dist.destroy_process_group()


def _in_turn(model: Any, batches: list[torch.Tensor], given: dict[str, Any]) -> list[torch.Tensor]:
    return [model.generate(ids, **given) for ids in batches]


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


def _timed(generate: Callable[[], list[torch.Tensor]]) -> tuple[float, list[torch.Tensor]]:
    """Seconds of the fastest run, and its tokens; the first run is not counted."""
    tokens, seconds = generate(), float("inf")
    for _ in range(_RUNS):
        start = time.perf_counter()
        tokens = generate()
        seconds = min(seconds, time.perf_counter() - start)
    return seconds, tokens


if __name__ == "__main__":
    main()
