"""A step of each rank of published layouts on tensors without memory, and its peak next to the plan's.

One process acts as a rank (``tests/support/lone_rank.py``). It builds the model on the meta device, divides and wraps
it by a plan, runs a step with AdamW, and plans the rank's part of a checkpoint. The peak counts each stream's tensors
at their true sizes, as an allocator without fragments has them; a plan next to it has no communicators.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.optim import AdamW

import nxdpp
from benchmarks.planner import published
from benchmarks.planner.published import Run
from benchmarks.report import markdown_table
from nxdpp import NxDPPModel
from nxdpp.checkpoint.distributed.captured import captured
from nxdpp.gradients.shards.local_tensors import local_rows
from nxdpp.pipeline.p2p.layout import TensorLayout
from nxdpp.pipeline.partition.transport_bytes import COMMUNICATOR_BYTES
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
    """Bytes of a rank: planned, at the peak of its step, and of its state in its file of a checkpoint.

    It has ``parameters``, with the ``names`` of the whole ones in the file.
    """

    rank: int
    parameters: int
    planned: float
    peak: int
    saved: int
    names: frozenset[str]


def layouts() -> list[tuple[Run, Layout, float | None]]:
    """Return runs, each with its layout and the published GiB of its fullest rank, if printed."""
    runs = [run for run in (*published.RUNS, published.DEEPSEEK_V3) if run.name in _RUNS]
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
        state = captured(wrapped, {"": optimizer}, None, None, None).tensors
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state)
        items = [item for item in planner.create_local_plan().items if not item.index.fqn.startswith("random.")]
        parameters = sum(local_rows(parameter).numel() for parameter in wrapped.local_parameters())
    written = [item.tensor_data for item in items if item.tensor_data is not None]
    saved = sum(each.chunk.sizes.numel() * each.properties.dtype.itemsize for each in written)
    outside = communicators(layout.pipeline, layout.data, layout.tensor) * COMMUNICATOR_BYTES
    names = frozenset(item.index.fqn.removeprefix("model.") for item in items if item.index.fqn.startswith("model."))
    return RankPeak(rank, parameters, plan.first.memory[rank].total - outside, reserved, saved, names)


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
