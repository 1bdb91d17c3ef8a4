"""Figures of runs that others published, next to the planner's predictions of their layouts.

The step of a run follows from what its source prints: FLOPs or tokens a second and device. Published memory is what
torch's allocator has reserved: a prediction next to it has no communicators.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from benchmarks.report import markdown_table
from nxdpp.pipeline.partition.balanced_partition import COMMUNICATOR_BYTES
from nxdpp.planning.configured_model import microbatch_on_meta
from nxdpp.planning.layout import Layout
from nxdpp.planning.machine import DEVICES, DeviceSpeed, Job, Link, Machine
from nxdpp.planning.model_costs import ModelCosts
from nxdpp.planning.predict import Prediction, predict
from nxdpp.ranks.transfer_groups import communicators

_COLUMNS = (
    "run", "tensor x pipeline x data", "schedule, stages a rank", "step: published, s", "predicted, s",
    "predicted / published", "memory: published, GiB", "predicted, GiB", "memory, predicted / published", "recipe",
)  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """Devices of a run, 8 on a host: speed, bytes of memory, and bytes a second of their links."""

    device: DeviceSpeed
    memory: int
    link: float
    host_link: float


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        name: its model and devices.
        model: key of ``_LLAMAS``, ``_GPTS`` or ``_MIXTURES``.
        cluster: its devices.
        batch: sequences of a step.
        length: tokens of a sequence.
        layout: sizes of the run.
        schedules: names and stages a rank that are predicted; several where the source has not printed them.
        seconds: of a step.
        differs: what the run does that no plan does; empty for the recipe of the plan.
        unknown: what the source has not printed.
        gradients: dtype in which they accumulate and are reduced.
        memory: GiB of the rank with the most, for each of ``schedules``; empty where the source has not printed it.
        kept: bytes that its last stage keeps and a plan's does not.
    """

    name: str
    model: str
    cluster: Cluster
    batch: int
    length: int
    layout: Layout
    schedules: tuple[tuple[str, int], ...]
    seconds: float
    differs: str = ""
    unknown: str = ""
    gradients: torch.dtype = torch.bfloat16
    memory: tuple[float, ...] = ()
    kept: float = 0.0

    @property
    def recipe(self) -> str:
        """The text of the table."""
        differs = f"differs: {self.differs}" if self.differs else "same"
        return differs + (f"; not printed: {self.unknown}" if self.unknown else "")


_A100 = Cluster(DEVICES["a100"], 80 * 10**9, 300e9, 25e9)
_H100 = Cluster(DEVICES["h100"], 80 * 10**9, 450e9, 50e9)
# The source: 2.4 TB/s, and a peak between that of the SXM module (989 TFLOP/s) and of the NVL (835), not known exactly.
_H100_500W = Cluster(DEVICES["h100"].with_data_sheet(912e12, 2.4e12), 96 * 2**30, 450e9, 50e9)
# NVLink of 400 GB/s, both ways together.
_H800 = Cluster(DEVICES["h100"], 80 * 10**9, 200e9, 50e9)
# FLOPs of a token by PaLM's definition (6 N + 12 L H Q T), which the source names: attention counts.
_LLAMA_FLOPS = 6 * 405e9 + 12 * 126 * 16384 * 8192
_FLOAT8 = "float8, torch.compile, asynchronous tensor collectives"
_TITAN = Layout(8, 8, 8, checkpoint=True, zero=2, sequence=True, microbatch=4)
# torch.distributed.pipelining keeps the logits of all 8 microbatches to the end; a plan's last stage frees them.
_LOGITS = 8 * 4 * 8192 * 128256 * 2 / 8
_STAGES = "stages a rank"
_MICROBATCHES = "microbatches (8, its default)"


def _llama_3(data: int, devices: int, flops: float) -> Run:
    return Run(
        f"Llama 3 405B, {devices:,} H100", "405B", _H100, 2048, 8192, Layout(8, 16, data, zero=2, sequence=True),
        (("interleaved", 4), ("interleaved", 7)), _LLAMA_FLOPS * 2048 * 8192 / (devices * flops), unknown=_STAGES,
        gradients=torch.float32,
    )  # fmt: skip


def _megatron(model: str, pipeline: int, data: int, batch: int, chunks: int, flops: float) -> Run:
    """Return a run of the paper, whose formula counts the recomputed forward."""
    layout, (hidden, layers, _, vocabulary, length) = Layout(8, pipeline, data, checkpoint=True), _GPTS[model]
    parts = 1 + length / (6 * hidden) + vocabulary / (16 * layers * hidden)
    counted = 96 * batch * length * layers * hidden**2 * parts
    return Run(
        f"Megatron-LM {model}, {layout.devices:,} A100", model, _A100, batch, length, layout,
        (("1f1b", 1), ("interleaved", chunks)), counted / (layout.devices * flops),
        unknown=f"{_STAGES}, samples of a microbatch",
    )  # fmt: skip


def _zero_bubble(model: str, devices: int, microbatch: int, microbatches: int, schedule: str, rate: float) -> Run:
    """Return a run at ``rate`` samples a second and device. ZB-1p has the memory and, there, the bubble of ZB-H1."""
    batch = microbatches * microbatch
    return Run(
        f"Zero Bubble {model}, {devices} A100", model, _A100, batch, 1024,
        Layout(pipeline=devices, microbatch=microbatch, zero=1), ((schedule, 1),), batch / devices / rate,
        unknown="vocabulary, link of hosts",
    )  # fmt: skip


# Hidden size, of feed-forward, layers and heads.
_LLAMAS = {"8B": (4096, 14336, 32, 32), "70B": (8192, 28672, 80, 64), "405B": (16384, 53248, 126, 128)}
# Hidden size, layers, heads, vocabulary and positions.
_GPTS = {
    "1.5B": (2304, 22, 24, 50304, 1024),
    "6.2B": (4096, 30, 32, 50304, 1024),
    "14.6B": (5120, 46, 40, 50304, 1024),
    "28.3B": (6144, 62, 48, 50304, 1024),
    "145.6B": (12288, 80, 96, 51200, 2048),
    "529.6B": (20480, 105, 128, 51200, 2048),
    "1,008B": (25600, 128, 160, 51200, 2048),
}
_LOAD = "load of experts"
# Active parameters without the embedding, and attention that is not causal, as Megatron counts.
_MIXTRAL_FLOPS = 6 * 12.75e9 + 12 * 32 * 4096 * 4096
_MIXTURES: dict[str, PreTrainedConfig] = {
    "Mixtral 8x7B": MixtralConfig(use_cache=False),
    "Qwen3-235B-A22B": Qwen3MoeConfig.from_dict(
        {
            "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
            "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 1536, "num_experts": 128,
            "num_experts_per_tok": 8, "use_cache": False,
        }
    ),
    "DeepSeek-V3": DeepseekV3Config(use_cache=False),
}  # fmt: skip
# Steps of 15,360 sequences, at 180,000 device hours for 1e12 tokens. The published layout has 64 ranks for the
# experts, and a pipeline of DualPipe with 2 copies of the weights.
DEEPSEEK_V3 = Run(
    "DeepSeek-V3, 2,048 H800", "DeepSeek-V3", _H100, 15360, 4096, Layout(8, 16, 16, zero=2),
    (("dualpipe-v", 2),), 15360 * 4096 / 2048 * 180_000 * 3600 / 1e12,
    "tensor groups in the place of experts over ranks, ZeRO-2 in the place of 1", "", torch.float32,
)  # fmt: skip
RUNS = (
    _llama_3(64, 8192, 430e12),
    _llama_3(128, 16384, 400e12),
    _megatron("145.6B", 8, 24, 2304, 2, 148e12),
    _megatron("529.6B", 35, 9, 2520, 3, 163e12),
    _megatron("1,008B", 64, 6, 3072, 2, 163e12),
    _zero_bubble("1.5B", 8, 6, 32, "1f1b", 12.5),
    _zero_bubble("1.5B", 8, 6, 32, "zb-h1", 13.4),
    _zero_bubble("6.2B", 8, 3, 32, "1f1b", 3.70),
    _zero_bubble("6.2B", 8, 3, 32, "zb-h1", 4.00),
    _zero_bubble("14.6B", 16, 1, 64, "1f1b", 1.49),
    _zero_bubble("14.6B", 16, 1, 64, "zb-h1", 1.67),
    _zero_bubble("28.3B", 32, 1, 128, "1f1b", 0.80),
    _zero_bubble("28.3B", 32, 1, 128, "zb-h1", 0.90),
    # 256 sequences of 8,192 tokens, at 100 and at 128 tokens a second and device.
    Run(
        "torchtitan 405B, 512 H100", "405B", _H100_500W, 256, 8192, _TITAN, (("1f1b", 1),), 256 * 8192 / 512 / 100,
        _FLOAT8, _MICROBATCHES, torch.float32, (82.5,), _LOGITS,
    ),
    Run(
        "torchtitan 405B, 512 H100", "405B", _H100_500W, 256, 8192, _TITAN, (("interleaved", 2),),
        256 * 8192 / 512 / 128, _FLOAT8, _MICROBATCHES, torch.float32, (72.7,), _LOGITS,
    ),
    Run(
        "torchtitan 70B, 256 H100", "70B", _H100_500W, 512, 8192,
        Layout(8, 1, 32, zero=3, checkpoint=True, sequence=True, microbatch=16), (("1f1b", 1),), 2 * 8192 / 829,
        "float8, torch.compile", "", torch.float32, (71.9,),
    ),
    # Selective checkpoints lie between none and all.
    Run(
        "torchtitan 8B, 8 H100", "8B", _H100_500W, 16, 8192, Layout(data=8, zero=3, microbatch=2), (("1f1b", 1),),
        2 * 8192 / 5762, "selective checkpoints", "", torch.float32, (82.4,),
    ),
    Run(
        "torchtitan 8B, 8 H100", "8B", _H100_500W, 16, 8192, Layout(data=8, zero=3, microbatch=2, checkpoint=True),
        (("1f1b", 1),), 2 * 8192 / 5762, "selective checkpoints", "", torch.float32, (82.4,),
    ),
    Run(
        "torchtitan 70B, 64 A100", "70B", _A100, 64, 8192, Layout(data=64, zero=3, checkpoint=True),
        (("1f1b", 1),), 8192 / 331, "", "link of hosts", torch.float32,
    ),
    Run(
        "torchtitan 405B, 128 H100", "405B", _H100_500W, 32, 8192,
        Layout(8, 1, 16, zero=3, checkpoint=True, sequence=True, microbatch=2), (("1f1b", 1),),
        2 * 8192 / 8 / 109, "", "", torch.float32,
    ),
    Run(
        "Mixtral 8x7B, 64 H100", "Mixtral 8x7B", _H100, 256, 4096, Layout(1, 4, 16, zero=1, experts=8),
        (("interleaved", 8),), _MIXTRAL_FLOPS * 256 * 4096 / (64 * 438e12), "ZeRO-1 exchanges in the schedule", _LOAD,
        torch.float32,
    ),
    Run(
        "Qwen3-235B-A22B, 256 H100", "Qwen3-235B-A22B", _H100, 2048, 4096, Layout(1, 8, 32, zero=1, experts=32),
        (("interleaved", 4),), 19.7, "tensor groups of 2, norms and activation functions recomputed, DeepEP", _LOAD,
        torch.float32,
    ),
    replace(
        DEEPSEEK_V3, cluster=_H800, layout=Layout(1, 16, 128, zero=1, experts=64), unknown=_LOAD,
        differs="DualPipe, float8, tokens to 4 hosts at most, parts of layers recomputed",
    ),
)  # fmt: skip


def table(runs: Iterable[Run] = RUNS) -> str:
    """Return a row for each run and schedule."""
    models: dict[str, PreTrainedModel] = {}
    rows = []
    for run in runs:
        model = models.setdefault(run.model, model_of(run.model))
        for number, (schedule, chunks) in enumerate(run.schedules):
            layout = replace(run.layout, schedule=schedule, chunks=chunks)
            rows.append(_cells(run, predicted(run, layout, model), run.memory[number] if run.memory else None))
    return markdown_table(_COLUMNS, rows, left=(*_COLUMNS[:3], _COLUMNS[-1]))


def model_of(name: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Return the model on the meta device, with parameters of ``dtype``."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(_config(name))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _config(name: str) -> PreTrainedConfig:
    if name in _MIXTURES:
        return _MIXTURES[name]
    return _gpt(name) if name in _GPTS else _llama(name)


def _gpt(name: str) -> GPT2Config:
    hidden, layers, heads, vocabulary, positions = _GPTS[name]
    return GPT2Config(
        vocab_size=vocabulary, n_positions=positions, n_embd=hidden, n_layer=layers, n_head=heads, use_cache=False,
    )  # fmt: skip


def _llama(name: str) -> LlamaConfig:
    hidden, middle, layers, heads = _LLAMAS[name]
    return LlamaConfig(
        vocab_size=128256, hidden_size=hidden, intermediate_size=middle, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=131072, use_cache=False,
    )  # fmt: skip


def _cells(run: Run, found: Prediction, memory: float | None) -> list[str]:
    layout, seconds = found.layout, found.step_seconds
    shared = f"ZeRO-{layout.zero}" if layout.data > 1 and layout.zero else ""
    experts = f"experts over {layout.experts}" if layout.experts > 1 else ""
    on = (shared, "recomputed" if layout.checkpoint else "", "sequence" if layout.sequence else "", experts)
    cells = ["", "", ""]
    if memory is not None:
        bytes_ = reserved(found, run.kept) / 2**30
        cells = [f"{memory:.1f}", f"{bytes_:.1f}", f"{bytes_ / memory:.2f}"]
    return [
        run.name,
        ", ".join([f"{layout.tensor} x {layout.pipeline} x {layout.data}", *filter(None, on)]),
        f"{layout.schedule}, {layout.chunks}",
        f"{run.seconds:.3g}",
        f"{seconds:.3g}",
        f"{seconds / run.seconds:.2f}",
        *cells,
        run.recipe,
    ]


def reserved(found: Prediction, kept: float = 0.0) -> float:
    """Return the predicted bytes of torch's allocator, of a last stage that keeps ``kept`` bytes more."""
    layout = found.layout
    outside = communicators(layout.pipeline, layout.data, layout.tensor) * COMMUNICATOR_BYTES
    *others, last = (rank.total for rank in found.memory)
    return max(*others, last + kept) - outside if others else last + kept - outside


def predicted(run: Run, layout: Layout, model: PreTrainedModel | None = None) -> Prediction:
    """Return the prediction of ``run`` with one of its schedules."""
    model = model or model_of(run.model)
    cluster = run.cluster
    machine = Machine(
        layout.devices, cluster.memory, cluster.device, layout.devices // 8, Link(cluster.link),
        Link(cluster.host_link, 20e-6),
    )  # fmt: skip
    job = Job(run.batch, lambda size: microbatch_on_meta(model, size, run.length))
    return predict(ModelCosts(model, machine, job, gradient_dtype=run.gradients), layout)
