"""Figures of runs that others published, next to the planner's predictions of their layouts.

The step of a run follows from what its source prints: FLOPs or tokens a second and device.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.report import markdown_table
from nxdpp.planning.configured_model import microbatch_on_meta
from nxdpp.planning.layout import Layout
from nxdpp.planning.machine import DEVICES, Job, Link, Machine
from nxdpp.planning.model_costs import ModelCosts
from nxdpp.planning.predict import predict

_NVLINK = {"a100": Link(300e9), "h100": Link(450e9)}
_COLUMNS = (
    "run", "tensor x pipeline x data", "schedule, stages a rank", "step: published, s", "predicted, s",
    "predicted / published", "memory: published, GiB", "predicted, GiB",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        name: its model and devices.
        model: ``"8B"``, ``"70B"`` and ``"405B"`` for Llama 3.1, ``"gpt"`` for a GPT of 1,008 billion parameters.
        device: name of the device.
        memory: bytes of one.
        host_rate: bytes a second of a device's network card.
        batch: sequences of a step.
        length: tokens of a sequence.
        layout: sizes of the run.
        schedules: names and stages a rank that are predicted; several where the source has not printed them.
        seconds: of a step.
        gibibytes: memory of a device; ``None`` where the source does not print it.
        bandwidth: of a device's memory where it is not the usual one.
    """

    name: str
    model: str
    device: str
    memory: int
    host_rate: float
    batch: int
    length: int
    layout: Layout
    schedules: tuple[tuple[str, int], ...]
    seconds: float
    gibibytes: float | None = None
    bandwidth: float | None = None


_TITAN = Layout(8, 8, 8, checkpoint=True, zero1=True, sequence=True)
RUNS = (
    # 6 N D FLOPs of a step, at 400 TFLOP/s and device.
    Run(
        "Llama 3 405B, 16,384 H100", "405B", "h100", 80 * 10**9, 50e9, 2048, 8192,
        Layout(8, 16, 128, zero1=True, sequence=True), (("1f1b", 1), ("interleaved", 4), ("interleaved", 7)),
        6 * 405e9 * 2048 * 8192 / (16384 * 400e12),
    ),
    # 256 sequences of 8,192 tokens, at 100 and at 128 tokens a second and device.
    Run(
        "torchtitan 405B, 512 H100", "405B", "h100", 96 * 2**30, 50e9, 256, 8192, _TITAN, (("1f1b", 1),),
        256 * 8192 / 512 / 100, 82.5, 2.4e12,
    ),
    Run(
        "torchtitan 405B, 512 H100", "405B", "h100", 96 * 2**30, 50e9, 256, 8192, _TITAN,
        (("interleaved", 2), ("interleaved", 4)), 256 * 8192 / 512 / 128, 72.7, 2.4e12,
    ),
    # In bfloat16, without float8: selective checkpoints lie between none and all.
    Run(
        "torchtitan 8B, 8 H100", "8B", "h100", 96 * 2**30, 50e9, 16, 8192,
        Layout(data=8, zero1=True, microbatch=2), (("1f1b", 1),), 2 * 8192 / 5762, bandwidth=2.4e12,
    ),
    Run(
        "torchtitan 8B, 8 H100", "8B", "h100", 96 * 2**30, 50e9, 16, 8192,
        Layout(data=8, zero1=True, microbatch=2, checkpoint=True), (("1f1b", 1),), 2 * 8192 / 5762, bandwidth=2.4e12,
    ),
    Run(
        "torchtitan 70B, 64 A100", "70B", "a100", 80 * 10**9, 25e9, 64, 8192,
        Layout(data=64, zero1=True, checkpoint=True), (("1f1b", 1),), 8192 / 331,
    ),
    Run(
        "torchtitan 405B, 128 H100", "405B", "h100", 96 * 2**30, 50e9, 32, 8192,
        Layout(8, 1, 16, zero1=True, checkpoint=True, sequence=True, microbatch=2), (("1f1b", 1),),
        2 * 8192 / 8 / 109, bandwidth=2.4e12,
    ),
    # The paper's formula counts 5.14e19 FLOPs a step, the recomputed forward among them; 163 TFLOP/s and device.
    Run(
        "Megatron-LM 1,008B, 3,072 A100", "gpt", "a100", 80 * 10**9, 25e9, 3072, 2048,
        Layout(8, 64, 6, checkpoint=True), (("1f1b", 1), ("interleaved", 2)), 5.14e19 / (3072 * 163e12),
    ),
)  # fmt: skip


def table(runs: Iterable[Run] = RUNS) -> str:
    """Return a row for each run and schedule."""
    models: dict[str, PreTrainedModel] = {}
    rows = []
    for run in runs:
        model = models.setdefault(run.model, _model(run.model))
        rows += [_cells(run, schedule, chunks, model) for schedule, chunks in run.schedules]
    return markdown_table(_COLUMNS, rows, left=_COLUMNS[:3])


def _model(name: str) -> PreTrainedModel:
    """Return the model on the meta device, with parameters of 16 bits."""
    with torch.device("meta"):
        model: PreTrainedModel = GPT2LMHeadModel(_GPT) if name == "gpt" else LlamaForCausalLM(_llama(*_LLAMAS[name]))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


_GPT = GPT2Config(vocab_size=51200, n_positions=2048, n_embd=25600, n_layer=128, n_head=160, use_cache=False)
# Hidden size, of feed-forward, layers and heads.
_LLAMAS = {"8B": (4096, 14336, 32, 32), "70B": (8192, 28672, 80, 64), "405B": (16384, 53248, 126, 128)}


def _llama(hidden: int, middle: int, layers: int, heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256, hidden_size=hidden, intermediate_size=middle, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=131072, use_cache=False,
    )  # fmt: skip


def _cells(run: Run, schedule: str, chunks: int, model: PreTrainedModel) -> list[str]:
    layout = replace(run.layout, schedule=schedule, chunks=chunks)
    machine = Machine(
        layout.devices, run.memory, DEVICES[run.device].with_data_sheet(None, run.bandwidth), layout.devices // 8,
        _NVLINK[run.device], Link(run.host_rate, 20e-6),
    )  # fmt: skip
    job = Job(run.batch, lambda size: microbatch_on_meta(model, size, run.length))
    found = predict(ModelCosts(model, machine, job), layout)
    switches = {"ZeRO-1": layout.zero1, "recomputed": layout.checkpoint, "sequence": layout.sequence}
    on = "".join(f", {name}" for name, is_on in switches.items() if is_on)
    return [
        run.name,
        f"{layout.tensor} x {layout.pipeline} x {layout.data}{on}",
        f"{schedule}, {chunks}",
        f"{run.seconds:.1f}",
        f"{found.step_seconds:.1f}",
        f"{found.step_seconds / run.seconds:.2f}",
        "" if run.gibibytes is None else f"{run.gibibytes:.1f}",
        f"{found.peak_bytes / 2**30:.1f}",
    ]
