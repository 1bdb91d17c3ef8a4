"""The slowest stage against the mean, cut evenly and balanced: predicted by FLOPs, measured in seconds.

    python benchmarks/partition.py

Predicted for a Llama of 16 layers and a vocabulary of 128,256 (the shape of Llama 3.2 1B, its head not tied) over 4
stages. Measured for one of half the width and half the vocabulary, whose head is as many layers heavy: forward and
backward of each stage run alone in this process, the two partitions in alternation, medians.
"""

import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp.pipeline.partition import stages_of_layers
from nxdpp.pipeline.placement import place_nodes
from nxdpp.pipeline.plan import summarise_stages
from nxdpp.pipeline.split import build_stage, plan_stages
from nxdpp.tracing.kinds import InputKind
from nxdpp.tracing.layers import find_layer_classes
from nxdpp.tracing.trace import TracingOptions, trace

STAGES = 4
ROUNDS = 5
TOKENS = 128


def main() -> None:
    """Print one table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    small = LlamaForCausalLM(_config(1))
    with torch.device("meta"):
        large = LlamaForCausalLM(_config(2))
    ids = torch.randint(0, 64000, (1, TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    on_meta = {name: torch.empty(1, 2048, dtype=torch.int64, device="meta") for name in batch}
    partitions = ("even", "balanced")
    plans = {how: summarise_stages(small, batch, STAGES, 1, how) for how in partitions}
    seconds: dict[str, list[list[float]]] = {how: [[] for _ in range(STAGES)] for how in partitions}
    for _ in range(ROUNDS):
        for how in partitions:
            cuts = [stage.layers[-1] for stage in plans[how][:-1]]
            layers = [layer for stage in plans[how] for layer in stage.layers]
            for stage, taken in enumerate(stage_seconds(small, batch, stages_of_layers(cuts, layers))):
                seconds[how][stage].append(taken)
    table = Table(
        "partition", "layers", "predicted", "predicted, half size", "measured, half size", "seconds of each stage"
    )
    for how in partitions:
        taken = [statistics.median(stage) for stage in seconds[how]]
        predicted = summarise_stages(large, on_meta, STAGES, 1, how)
        table.add_row(
            how,
            "/".join(str(len(stage.layers)) for stage in predicted),
            f"{_ratio([stage.forward + stage.backward for stage in predicted]):.3f}",
            f"{_ratio([stage.forward + stage.backward for stage in plans[how]]):.3f}",
            f"{_ratio(taken):.3f}",
            " ".join(f"{value:.2f}" for value in taken),
        )
    Console(width=120).print(table)


def _config(scale: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64128 * scale,
        hidden_size=1024 * scale,
        intermediate_size=4096 * scale,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
    )


def _ratio(work: list[float]) -> float:
    return max(work) / statistics.mean(work)


def stage_seconds(model: nn.Module, batch: dict[str, torch.Tensor], layer_stages: dict[str, int]) -> list[float]:
    """Seconds of forward and backward of each stage, one after the other."""
    options = TracingOptions(find_layer_classes(model, None))
    traced = trace(model, {name: InputKind(v.ndim, v.dtype) for name, v in batch.items()}, {}, options)
    placed = place_nodes(traced, model, layer_stages)
    loss = next(node for node in traced.graph.nodes if node.name == "ForCausalLMLoss")
    values: dict[str, Any] = {}
    taken = []
    for plan in plan_stages(traced, model, placed, [loss], STAGES):
        stage = build_stage(plan, traced, model, placed)
        received = [values[name].detach().requires_grad_() for name in plan.received]
        given = [*(batch[name] for name in plan.inputs), *received, *(values[name] for name in plan.stand_ins)]
        started = time.perf_counter()
        made = stage(*given)
        ends = [value for value in made if value.requires_grad]
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        taken.append(time.perf_counter() - started)
        values |= dict(zip(plan.made, made, strict=True))
    return taken


main()
