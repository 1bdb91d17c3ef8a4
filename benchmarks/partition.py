"""The slowest stage against the mean, cut evenly, balanced and profiled: predicted, and measured.

    python -m benchmarks.partition

Predicted for a Llama of 16 layers and a vocabulary of 128,256 (the shape of Llama 3.2 1B, its head not tied, 16 bits,
microbatches of one sequence of 2048) over 4 stages. Predicted and measured for one of half the width and half the
vocabulary: forward and backward of each stage alone in this process, on one thread, gradients added to those of an
earlier microbatch; the partitions in alternation, the first round not counted. CPU time is what counts where other
processes run; wall-clock time is shown beside it.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from nxdpp.pipeline.cost.count import count_costs
from nxdpp.pipeline.cost.layer_costs import layer_costs
from nxdpp.pipeline.cost.measure import profile_nodes
from nxdpp.pipeline.partition.assignment import place_nodes
from nxdpp.pipeline.partition.balance import LayerCost, balanced_cuts
from nxdpp.pipeline.partition.cuts import even_cuts, stages_of_layers
from nxdpp.pipeline.stages.split import StagePlan, build_stage, plan_stages
from nxdpp.tracing.input_specs import InputSpec
from nxdpp.tracing.layers import find_layer_classes
from nxdpp.tracing.sizes import shapes_of
from nxdpp.tracing.trace import TracedGraph, TracingOptions, trace

STAGES = 4
ROUNDS = 5
TOKENS = 128
LARGE_TOKENS = 2048
CPU = torch.device("cpu")
GPU = torch.device("cuda")


def main() -> None:
    """Print one table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    small: PreTrainedModel = LlamaForCausalLM(_config(1))
    ids = torch.randint(0, small.config.vocab_size, (1, TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    traced = _trace(small, batch)
    counted = _counted(traced, small, batch, CPU)
    timed = _timed(traced, small, batch)
    large = _large()
    cuts = {
        "even": even_cuts(traced.layers, STAGES),
        "balanced": balanced_cuts(counted, STAGES),
        "profiled": balanced_cuts(timed, STAGES),
    }
    # Two ways to cut may come to the same cut.
    runs = {tuple(at): _StageRuns(traced, small, batch, at) for at in cuts.values()}
    seconds: dict[tuple[str, ...], list[list[_Seconds]]] = {at: [] for at in runs}
    for _ in range(ROUNDS + 1):
        for at, run in runs.items():
            seconds[at].append(run.measure())
    table = Table("partition", "of the large", "predicted", "of the half", "predicted", "CPU time", "wall", "CPU s")
    for how, cut in cuts.items():
        rounds = seconds[tuple(cut)][1:]
        large_cuts = even_cuts(traced.layers, STAGES) if how == "even" else balanced_cuts(large, STAGES)
        known = how != "profiled"
        table.add_row(
            how,
            _sizes(large, large_cuts) if known else "",
            f"{_ratio(_sums(large, large_cuts)):.3f}" if known else "",
            _sizes(counted, cut),
            f"{_ratio(_sums(timed if how == 'profiled' else counted, cut)):.3f}",
            _spread([[stage.cpu for stage in stages] for stages in rounds]),
            _spread([[stage.wall for stage in stages] for stages in rounds]),
            " ".join(f"{value:.2f}" for value in _medians([[stage.cpu for stage in stages] for stages in rounds])),
        )
    Console(width=160).print(table)


def _config(scale: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64128 * scale,
        hidden_size=1024 * scale,
        intermediate_size=4096 * scale,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
    )


def _trace(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> TracedGraph:
    options = TracingOptions(find_layer_classes(model, None))
    specs = {name: InputSpec(value.ndim, value.dtype) for name, value in batch.items()}
    return trace(model, specs, {}, options, shapes_of(batch))


def _counted(
    traced: TracedGraph, model: nn.Module, batch: Mapping[str, torch.Tensor], device: torch.device
) -> list[LayerCost]:
    return layer_costs(traced, model, count_costs(traced, model, batch, device), traced.layers)


def _timed(traced: TracedGraph, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> list[LayerCost]:
    placed = place_nodes(traced, model, {layer: index for index, layer in enumerate(traced.layers)})
    seconds = profile_nodes(traced, model, batch, placed, CPU)
    costs = count_costs(traced, model, batch, CPU)
    timed = {node: replace(cost, work=seconds.get(node, 0.0)) for node, cost in costs.items()}
    return layer_costs(traced, model, timed, traced.layers)


def _large() -> list[LayerCost]:
    with torch.device("meta"):
        model: PreTrainedModel = LlamaForCausalLM(_config(2)).to(torch.bfloat16)  # type: ignore[arg-type]
    ids = torch.empty(1, LARGE_TOKENS, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    return _counted(_trace(model, batch), model, batch, GPU)


@dataclass(frozen=True)
class _Seconds:
    cpu: float
    wall: float


class _StageRuns:
    """The stages of one partition, to be run one after the other."""

    def __init__(
        self, traced: TracedGraph, model: nn.Module, batch: Mapping[str, torch.Tensor], cuts: Sequence[str]
    ) -> None:
        placed = place_nodes(traced, model, stages_of_layers(cuts, traced.layers), number=STAGES)
        loss = next(node for node in traced.graph.nodes if node.name == "ForCausalLMLoss")
        self._batch = batch
        self._stages: list[tuple[StagePlan, fx.GraphModule]] = [
            (plan, build_stage(plan, traced, model, placed))
            for plan in plan_stages(traced, model, placed, [loss], STAGES)
        ]

    def measure(self) -> list[_Seconds]:
        """Seconds of forward and backward of each stage."""
        values: dict[str, Any] = {}
        taken = []
        for plan, stage in self._stages:
            received = [values[name].detach().requires_grad_() for name in plan.received]
            given = [
                *(self._batch[name] for name in plan.inputs),
                *received,
                *(values[name] for name in plan.received_metadata),
            ]
            wall, cpu = time.perf_counter(), time.process_time()
            made = stage(*given)
            ends = [value for value in made if value.requires_grad]
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
            taken.append(_Seconds(time.process_time() - cpu, time.perf_counter() - wall))
            values |= {name: value.detach() for name, value in zip(plan.made, made, strict=True)}
        return taken


def _sums(costs: Sequence[LayerCost], cuts: Sequence[str]) -> list[float]:
    return [sum(cost.work for cost in stage) for stage in _runs(costs, cuts)]


def _sizes(costs: Sequence[LayerCost], cuts: Sequence[str]) -> str:
    *others, last = [len(stage) for stage in _runs(costs, cuts)]
    return "/".join(map(str, [*others, last - 1]))  # without the head


def _runs(costs: Sequence[LayerCost], cuts: Sequence[str]) -> list[list[LayerCost]]:
    found: list[list[LayerCost]] = [[]]
    for cost in costs:
        found[-1].append(cost)
        if cost.layer in cuts:
            found.append([])
    return found


def _medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(stage) for stage in zip(*rounds, strict=True)]


def _spread(rounds: Sequence[Sequence[float]]) -> str:
    each = [_ratio(stages) for stages in rounds]
    return f"{_ratio(_medians(rounds)):.3f} ({min(each):.3f} to {max(each):.3f})"


def _ratio(work: Sequence[float]) -> float:
    return max(work) / statistics.mean(work)


if __name__ == "__main__":
    main()
