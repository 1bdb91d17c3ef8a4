"""Figures of runs that others published, next to the planner's predictions of their layouts.

The step of a run follows from what its source prints: FLOPs or tokens a second and device. FSDP hides its exchange
under the computation: the longer of the two is predicted for it, where the planner adds them up for ZeRO-1.
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
from nxdpp.planning.predict import Prediction, predict

_NVLINK = {"a100": Link(300e9), "h100": Link(450e9)}
_COLUMNS = (
    "run", "tensor x pipeline x data", "schedule, stages a rank", "step: published, s", "predicted, s",
    "predicted / published", "the run differs by",
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
        bandwidth: of a device's memory where it is not the usual one.
        fsdp: FSDP takes the place of ZeRO-1.
        differs: what else the run does that is not predicted.
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
    bandwidth: float | None = None
    fsdp: bool = False
    differs: str = ""


# FLOPs of a token by PaLM's definition (6 N + 12 L H Q T), which the source names: attention counts.
_LLAMA_FLOPS = 6 * 405e9 + 12 * 126 * 16384 * 8192
# FSDP gathers parameters for the forward and for the backward, and scatters gradients; ZeRO-1 gathers once.
_FSDP_EXCHANGES = 3 / 2
_STAGES = "stages a rank are not printed"
_FLOAT8 = "float8, compiled, asynchronous tensor collectives, 500 W"
_TITAN = Layout(8, 8, 8, checkpoint=True, zero1=True, sequence=True)
RUNS = (
    # At 430 and at 400 TFLOP/s and device.
    Run(
        "Llama 3 405B, 8,192 H100", "405B", "h100", 80 * 10**9, 50e9, 2048, 8192,
        Layout(8, 16, 64, zero1=True, sequence=True), (("interleaved", 4), ("interleaved", 7)),
        _LLAMA_FLOPS * 2048 * 8192 / (8192 * 430e12), differs=_STAGES,
    ),
    Run(
        "Llama 3 405B, 16,384 H100", "405B", "h100", 80 * 10**9, 50e9, 2048, 8192,
        Layout(8, 16, 128, zero1=True, sequence=True), (("interleaved", 4), ("interleaved", 7)),
        _LLAMA_FLOPS * 2048 * 8192 / (16384 * 400e12), differs=_STAGES,
    ),
    # 256 sequences of 8,192 tokens, at 100 and at 128 tokens a second and device.
    Run(
        "torchtitan 405B, 512 H100", "405B", "h100", 96 * 2**30, 50e9, 256, 8192, _TITAN, (("1f1b", 1),),
        256 * 8192 / 512 / 100, 2.4e12, True, _FLOAT8,
    ),
    Run(
        "torchtitan 405B, 512 H100", "405B", "h100", 96 * 2**30, 50e9, 256, 8192, _TITAN,
        (("interleaved", 2), ("interleaved", 4)), 256 * 8192 / 512 / 128, 2.4e12, True, f"{_FLOAT8}; {_STAGES}",
    ),
    # In bfloat16, without float8: selective checkpoints lie between none and all.
    Run(
        "torchtitan 8B, 8 H100", "8B", "h100", 96 * 2**30, 50e9, 16, 8192,
        Layout(data=8, zero1=True, microbatch=2), (("1f1b", 1),), 2 * 8192 / 5762, 2.4e12, True,
        "selective checkpoints, 500 W",
    ),
    Run(
        "torchtitan 8B, 8 H100", "8B", "h100", 96 * 2**30, 50e9, 16, 8192,
        Layout(data=8, zero1=True, microbatch=2, checkpoint=True), (("1f1b", 1),), 2 * 8192 / 5762, 2.4e12, True,
        "selective checkpoints, 500 W",
    ),
    Run(
        "torchtitan 70B, 64 A100", "70B", "a100", 80 * 10**9, 25e9, 64, 8192,
        Layout(data=64, zero1=True, checkpoint=True), (("1f1b", 1),), 8192 / 331, fsdp=True,
    ),
    Run(
        "torchtitan 405B, 128 H100", "405B", "h100", 96 * 2**30, 50e9, 32, 8192,
        Layout(8, 1, 16, zero1=True, checkpoint=True, sequence=True, microbatch=2), (("1f1b", 1),),
        2 * 8192 / 8 / 109, 2.4e12, True, "500 W (assumed)",
    ),
    # The paper's formula counts 5.14e19 FLOPs a step, the recomputed forward among them; 163 TFLOP/s and device.
    Run(
        "Megatron-LM 1,008B, 3,072 A100", "gpt", "a100", 80 * 10**9, 25e9, 3072, 2048,
        Layout(8, 64, 6, checkpoint=True), (("1f1b", 1), ("interleaved", 2)), 5.14e19 / (3072 * 163e12),
        differs=f"fused kernels, float16; {_STAGES}",
    ),
)  # fmt: skip


def table(runs: Iterable[Run] = RUNS) -> str:
    """Return a row for each run and schedule."""
    models: dict[str, PreTrainedModel] = {}
    rows = []
    for run in runs:
        model = models.setdefault(run.model, _model(run.model))
        rows += [_cells(run, schedule, chunks, model) for schedule, chunks in run.schedules]
    return markdown_table(_COLUMNS, rows, left=(*_COLUMNS[:3], _COLUMNS[-1]))


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
    seconds = _overlapped(found) if run.fsdp else found.step_seconds
    sharded = "FSDP" if run.fsdp else "ZeRO-1"
    switches = {sharded: layout.zero1, "recomputed": layout.checkpoint, "sequence": layout.sequence}
    on = "".join(f", {name}" for name, is_on in switches.items() if is_on)
    return [
        run.name,
        f"{layout.tensor} x {layout.pipeline} x {layout.data}{on}",
        f"{schedule}, {chunks}",
        f"{run.seconds:.1f}",
        f"{seconds:.1f}",
        f"{seconds / run.seconds:.2f}",
        run.differs,
    ]


def _overlapped(found: Prediction) -> float:
    """Return the seconds of a step whose exchange is FSDP's, and hides."""
    return max(
        max(rank.compute + rank.tensor + rank.bubble, _FSDP_EXCHANGES * rank.average) + rank.optimizer
        for rank in found.times
    )
