"""How long tracing and cutting take, for a Llama of 80 layers with the shapes of the 70B one, on the meta device.

    python -m benchmarks.trace_speed

Construction: the first trace, the cut, and this rank's part. First step: the graph for the inputs and mode of a first
``run_train``, the plan of every stage, this stage's module and the fingerprint. New shape: the same once more for
inputs of another length. Nothing runs, so nothing is allocated.
"""

import statistics
import time
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp.pipeline.example_inputs import example_shapes, example_specs
from nxdpp.pipeline.local.tree import build_local_module, free_others, local_names
from nxdpp.pipeline.partition.partition import make_partition
from nxdpp.pipeline.stages.program_cache import ProgramCache
from nxdpp.tracing.layers import find_layer_classes, layer_names
from nxdpp.tracing.trace import TracingOptions, trace

LAYERS, STAGES, REPEATS = 80, 8, 5


class Seconds(NamedTuple):
    """What one construction and its first steps took."""

    construction: float
    first_step: float
    with_a_mask: float
    new_shape: float


def main() -> None:
    """Print the first time, in a fresh process, and the median of the next."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=LAYERS,
        num_attention_heads=64, num_key_value_heads=8,
    )  # fmt: skip
    times = [measure(config) for _ in range(1 + REPEATS)]
    table = Table("", "first ms", "median ms", title=f"{LAYERS} layers, {STAGES} stages")
    for name in Seconds._fields:
        values = [1000 * getattr(seconds, name) for seconds in times]
        table.add_row(name.replace("_", " "), f"{values[0]:.0f}", f"{statistics.median(values[1:]):.0f}")
    Console().print(table)


def measure(config: LlamaConfig) -> Seconds:
    """Construct the last stage as ``NxDPPModel`` does, and prepare its first steps."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    started = time.perf_counter()
    cache = construct(model)
    constructed = time.perf_counter() - started
    ids = torch.zeros(1, 8, dtype=torch.int64)
    longer = torch.zeros(1, 16, dtype=torch.int64)
    first = step_seconds(cache, {"input_ids": ids, "labels": ids})
    masked = step_seconds(cache, {"input_ids": ids, "labels": ids, "attention_mask": ids})
    new = step_seconds(cache, {"input_ids": longer, "labels": longer})
    return Seconds(constructed, first, masked, new)


def construct(model: LlamaForCausalLM) -> ProgramCache:
    """Trace, cut, and keep the last stage."""
    options = TracingOptions(find_layer_classes(model, None))
    specs = example_specs(model, None)
    traced = trace(model, specs, {}, options, example_shapes(model, specs))
    partition = make_partition(traced, model, layer_names(model, options.layer_classes), STAGES)
    cache = ProgramCache(partition, options, None, (STAGES - 1,), {})
    local = local_names(partition.owners, STAGES - 1)
    free_others(model, local)
    build_local_module(model, local, partition.layers)
    return cache


def step_seconds(cache: ProgramCache, inputs: dict[str, torch.Tensor]) -> float:
    """What comes before a step with such inputs for the first time."""
    started = time.perf_counter()
    cache.program(cache.cut_graph(inputs, True), "loss")
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
