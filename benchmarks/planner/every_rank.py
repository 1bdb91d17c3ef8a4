"""A step of each rank of published layouts on tensors without memory, and its peak next to the plan's.

One process acts as a rank (``tests/support/lone_rank.py``). It builds the model on the meta device, divides and wraps
it by a plan, runs a step with AdamW, and plans what the rank writes of a checkpoint, and what it reads of one that a
single process wrote. The peak counts each stream's tensors at their true sizes, as an allocator without fragments has
them; a plan next to it has no communicators.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem
from torch.optim import AdamW

import nxdpp
from benchmarks.planner import published
from benchmarks.planner.published import Run
from benchmarks.report import markdown_table
from nxdpp import NxDPPModel
from nxdpp.checkpoint.distributed.captured import Described, captured
from nxdpp.checkpoint.distributed.content import content_of
from nxdpp.checkpoint.distributed.document import Document
from nxdpp.checkpoint.distributed.load_targets import LoadArguments, LoadTargets
from nxdpp.checkpoint.distributed.model_state import model_tensors
from nxdpp.gradients.shards.local_tensors import local_rows
from nxdpp.pipeline.p2p.layout import TensorLayout
from nxdpp.pipeline.partition.balanced_partition import COMMUNICATOR_BYTES
from nxdpp.planning.layout import Layout
from nxdpp.planning.plan import Plan
from nxdpp.ranks.rank_mesh import RankMesh
from nxdpp.ranks.transfer_groups import communicators
from tests.support.lone_rank import lone_rank, register

_COLUMNS = (
    "run", "tensor x pipeline x data", "schedule, stages a rank", "rank", "plan, GiB", "peak, GiB", "peak / plan",
    "published, GiB", "checkpoint, GiB",
)  # fmt: skip
_RUNS = ("Llama 3 405B, 16,384 H100", "torchtitan 405B, 512 H100", "DeepSeek-V3, 2,048 H800")
# The peak has its full height after so many times the ranks of a pipeline.
_TIMES = 2


@dataclass(frozen=True)
class RankPeak:
    """Bytes of a rank: planned, at the peak of its step, of its state in its file of a checkpoint, and that it reads.

    It has ``parameters``, with the ``names`` of the whole ones in the file.
    """

    rank: int
    parameters: int
    planned: float
    peak: int
    saved: int
    read: int
    names: frozenset[str]


def layouts() -> list[tuple[Run, Layout, float | None]]:
    """Return runs, each with its layout and the published GiB of its fullest rank, if printed."""
    runs = [run for run in (*published.RUNS, published.DEEPSEEK_V3) if run.name in _RUNS and run.layout.experts == 1]
    return [
        (run, replace(run.layout, schedule=name, chunks=chunks), run.memory[0] if run.memory else None)
        for run in runs
        for name, chunks in run.schedules[:1]
    ]


def plan_of(run: Run, layout: Layout) -> Plan:
    """Return the plan of ``run``, with a few of its microbatches."""
    register()
    few = min(layout.microbatches(run.batch), _TIMES * layout.pipeline)
    return nxdpp.plan(
        published.model_of(run.model),
        devices=layout.devices,
        hosts=layout.devices // 8,
        device_memory="1000GB",
        global_batch=few * layout.data * layout.microbatch,
        seq_length=run.length,
        device=run.cluster.device,
        gradient_dtype=run.gradients,
        layouts=[layout],
    )


def peaks(run: Run, plan: Plan, ranks: Iterable[int]) -> list[RankPeak]:
    """Run each of ``ranks`` of the pipeline, first of its tensor group and replica."""
    return [_peak(run, plan, rank) for rank in ranks]


def _peak(run: Run, plan: Plan, rank: int) -> RankPeak:
    layout = plan.layout
    mesh = RankMesh(layout.pipeline, layout.data, layout.tensor)
    model = published.model_of(run.model, torch.float32)
    shape = layout.microbatch, run.length, model.config.hidden_size
    part = layout.microbatch, run.length // layout.tensor if layout.sequence else run.length, shape[-1]
    metas = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in (part, shape)]
    boundary = [TensorLayout(each.size(), each.stride(), each.dtype, requires_grad=True) for each in metas]
    rows = torch.zeros(plan.global_batch // layout.data, run.length, dtype=torch.int64)
    with lone_rank(mesh, rank, *boundary) as memory:
        wrapped = NxDPPModel.from_plan(model, plan)
        optimizer = AdamW(wrapped.local_parameters())
        # The optimizer has its state before the step.
        for parameter in wrapped.local_parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        wrapped.run_train(input_ids=rows, labels=rows)
        optimizer.step()
        reserved = memory.reserved
        tensors, described = captured(wrapped, {"": optimizer}, None, None, None)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors)
        items = planner.create_local_plan().items
        read = _read_bytes(wrapped, optimizer, described, items)
        parameters = sum(local_rows(parameter).numel() for parameter in wrapped.local_parameters())
    saved = sum(each.chunk.sizes.numel() * each.properties.dtype.itemsize for _, each in _written(items))
    outside = communicators(layout.pipeline, layout.data, layout.tensor) * COMMUNICATOR_BYTES
    names = frozenset(name.removeprefix("model.") for name, _ in _written(items) if name.startswith("model."))
    return RankPeak(rank, parameters, plan.first.memory[rank].total - outside, reserved, saved, read, names)


def _read_bytes(model: NxDPPModel, optimizer: AdamW, described: Described, items: Sequence[WriteItem]) -> int:
    """Bytes of the values that the rank reads of a checkpoint of one process; no value is read."""
    nothing = dict.fromkeys(("scheduler", "grad_scaler", "user_content"))
    content = content_of([replace(described, others=nothing)]) | {"layout": {}}
    metadata = Metadata(
        {
            name: TensorStorageMetadata(
                each.properties, each.size, [ChunkStorageMetadata(torch.Size([0] * len(each.size)), each.size)]
            )
            for name, each in _written(items)
        }
    )
    targets = LoadTargets(Path("one_process"), Document(content, metadata))
    targets.prepare(LoadArguments(model, {"": optimizer}, None, None, strict=True), model_tensors(model))
    tensors = targets.tensors
    plan = create_default_local_load_plan(dict(tensors), metadata)
    return sum(each.lengths.numel() * tensors[each.dest_index.fqn].dtype.itemsize for each in plan.items)


def _written(items: Iterable[WriteItem]) -> Iterator[tuple[str, TensorWriteData]]:
    """Names of tensors and what the rank writes of each, without states of random generators."""
    for item in items:
        if item.tensor_data is not None and not item.index.fqn.startswith("random."):
            yield item.index.fqn, item.tensor_data


def all_peaks() -> Iterator[tuple[Run, Layout, float | None, list[RankPeak]]]:
    """Run all ranks of all layouts."""
    for run, layout, gib in layouts():
        yield run, layout, gib, peaks(run, plan_of(run, layout), range(layout.pipeline))


def table(found: Iterable[tuple[Run, Layout, float | None, Sequence[RankPeak]]]) -> str:
    """Return a row for each rank; the published figure is of the fullest one."""
    rows = []
    for run, layout, gib, of_ranks in found:
        for each in of_ranks:
            sizes, bytes_ = f"{layout.tensor} x {layout.pipeline} x {layout.data}", [each.planned, each.peak]
            rows.append(
                [
                    run.name, sizes, f"{layout.schedule}, {layout.chunks}", str(each.rank),
                    *(f"{number / 2**30:.1f}" for number in bytes_), f"{each.peak / each.planned:.2f}",
                    "not published" if gib is None else f"{gib:.1f}", f"{each.saved / 2**30:.2f}",
                ]
            )  # fmt: skip
    return markdown_table(_COLUMNS, rows, left=_COLUMNS[:3])
