"""Work of the slowest stage over the mean, for even, balanced and profiled cuts: predicted and measured.

    python benchmarks/partition.py

Large: a Llama with 16 layers and a vocabulary of 128,256 (the shape of Llama 3.2 1B with an untied head), 16 bits,
sequences of 2048, over 4 stages. Predicted only. Half: half the width and half the vocabulary, 32 bits, sequences of
128. Predicted and measured: forward and backward of each stage by itself, one thread, gradients added to earlier ones.
The partitions alternate; the first round does not count.
"""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel  # noqa: E402

from benchmarks.report import markdown_table  # noqa: E402
from nxdpp.pipeline.partition.balanced_partition import measured_costs  # noqa: E402
from nxdpp.pipeline.partition.layer_costs import layer_costs  # noqa: E402
from nxdpp.pipeline.partition.partition import GivenCuts, even  # noqa: E402
from nxdpp.schedules.balance import LayerCost, balanced_cuts  # noqa: E402
from nxdpp.tracing.costs.count import count_costs  # noqa: E402
from nxdpp.tracing.graph.trace import TracedGraph  # noqa: E402
from tests.support.in_process import InProcessPipeline, stage_arguments  # noqa: E402

STAGES = 4
ROUNDS = 5
HALF_TOKENS, LARGE_TOKENS = 128, 2048
COLUMNS = (
    "partition",
    "large, layers",
    "predicted",
    "half, layers",
    "predicted",
    "CPU time",
    "wall",
    "CPU s of stages",
)


class Seconds(NamedTuple):
    """Time of forward and backward of one stage."""

    cpu: float
    wall: float


def main() -> None:
    """Print one table in Markdown."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    half: PreTrainedModel = LlamaForCausalLM(_config(1))
    ids = torch.randint(0, half.config.vocab_size, (1, HALF_TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    traced = InProcessPipeline(half, STAGES, batch).cut.traced
    costs = {"balanced": _counted(traced, half, batch, "cpu"), "profiled": _profiled(traced, half, batch)}
    costs["even"] = costs["balanced"]
    cuts = {name: _cuts(name, traced, costs[name]) for name in ("even", "balanced", "profiled")}
    # Two policies may choose the same cuts.
    pipelines = {tuple(at): InProcessPipeline(half, STAGES, batch, policy=GivenCuts(at)) for at in cuts.values()}
    rounds: dict[tuple[str, ...], list[list[Seconds]]] = {at: [] for at in pipelines}
    for _ in range(ROUNDS + 1):
        for at, pipeline in pipelines.items():
            rounds[at].append(_run_stages(pipeline, batch))
    rows = []
    for name, at in cuts.items():
        cpu, wall = ([[getattr(s, clock) for s in each] for each in rounds[tuple(at)][1:]] for clock in Seconds._fields)
        seconds = " ".join(f"{value:.2f}" for value in _medians(cpu))
        rows.append([name, *_large_cells(name), *_predicted(costs[name], at), _spread(cpu), _spread(wall), seconds])
    print(markdown_table(COLUMNS, rows, left=("partition", "large, layers", "half, layers", "CPU s of stages")))


def _config(scale: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64128 * scale, hidden_size=1024 * scale, intermediate_size=4096 * scale, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip


def _large_cells(name: str) -> list[str]:
    """Layers of each stage and the predicted ratio of the large model, which cannot be profiled here."""
    if name == "profiled":
        return ["", ""]
    with torch.device("meta"):
        model: PreTrainedModel = LlamaForCausalLM(_config(2)).to(torch.bfloat16)  # type: ignore[arg-type]  # transformers' decorator hides the signature
        ids = torch.empty(1, LARGE_TOKENS, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    traced = InProcessPipeline(model, STAGES, batch).cut.traced
    costs = _counted(traced, model, batch, "cuda")
    return _predicted(costs, _cuts(name, traced, costs))


def _counted(
    traced: TracedGraph, model: PreTrainedModel, batch: Mapping[str, torch.Tensor], device: str
) -> list[LayerCost]:
    return layer_costs(traced, model, count_costs(traced, model, batch, torch.device(device)))


def _profiled(traced: TracedGraph, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> list[LayerCost]:
    return layer_costs(traced, model, measured_costs(traced, model, batch, torch.device("cpu")))


def _cuts(name: str, traced: TracedGraph, costs: Sequence[LayerCost]) -> list[str]:
    return even(traced, STAGES) if name == "even" else balanced_cuts(costs, STAGES)


def _run_stages(pipeline: InProcessPipeline, batch: Mapping[str, torch.Tensor]) -> list[Seconds]:
    """Run forward and backward of each stage of the loss, one stage after the other."""
    cut, plans = pipeline.loss_plans(batch)
    made: list[dict[str, Any]] = []
    taken = []
    for plan in plans:
        stage = cut.build(plan)
        given, received, placeholders = stage_arguments(plan, batch, made)
        received = [value.detach().requires_grad_() for value in received]
        wall, cpu = time.perf_counter(), time.process_time()
        values = stage(*given, *received, *placeholders)
        ends = [value for value in values if value.requires_grad]
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        taken.append(Seconds(time.process_time() - cpu, time.perf_counter() - wall))
        made.append({name: value.detach() for name, value in zip(plan.made, values, strict=True)})
    return taken


def _predicted(costs: Sequence[LayerCost], cuts: Sequence[str]) -> list[str]:
    """Layers of each stage, and its work over the mean."""
    stages: list[list[LayerCost]] = [[]]
    for cost in costs:
        stages[-1].append(cost)
        if cost.layer in cuts:
            stages.append([])
    *others, last = map(len, stages)
    # The head counts as a layer of the last stage.
    sizes = "/".join(map(str, [*others, last - 1]))
    return [sizes, f"{_ratio([sum(cost.work for cost in stage) for stage in stages]):.3f}"]


def _medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(stage) for stage in zip(*rounds, strict=True)]


def _spread(rounds: Sequence[Sequence[float]]) -> str:
    each = [_ratio(stages) for stages in rounds]
    return f"{_ratio(_medians(rounds)):.3f} ({min(each):.3f} to {max(each):.3f})"


def _ratio(work: Sequence[float]) -> float:
    return max(work) / statistics.mean(work)


if __name__ == "__main__":
    main()
