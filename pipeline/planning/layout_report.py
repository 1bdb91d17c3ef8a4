"""Text of a layout: a row for each rank, one for each of its stages under it, and a total."""

from collections.abc import Iterator

from nxdpp.pipeline.planning.layout_result import LayoutResult
from nxdpp.pipeline.planning.rank_summary import RankSummary
from nxdpp.pipeline.planning.stage_summary import StageSummary
from nxdpp.pipeline.planning.text_table import bytes_text, four_digits, paragraph, table

_TERA = 1e12
_MORE = "--details: FLOPs, parts of the state, sent bytes of each stage; --json: all"


def report(result: LayoutResult, details: bool = False) -> str:
    """Return the text that the command prints; with ``details`` the other figures of each stage too."""
    lines = [paragraph(line) for line in _heading(result)]
    lines += ["", *_ranks(result), ""]
    lines += [paragraph(line) for line in _below(result)]
    if details:
        lines += ["", *_details(result)]
        if result.has_dimensions:
            lines += ["", *_traffic(result)]
    lines += [paragraph(note) for note in result.notes]
    if not details:
        lines.append(_MORE)
    return "\n".join(lines)


def _heading(result: LayoutResult) -> Iterator[str]:
    sizes, ranks = result.options.sizes, result.options.schedule.ranks
    on = f"{ranks} rank{'s' if ranks > 1 else ''}"
    if result.has_dimensions:
        on = f"{sizes.tensor} tensor x {ranks} pipeline x {sizes.data} data ranks"
    switches = f"{', sequence parallel' if sizes.sequence else ''}{', ZeRO-1' if sizes.zero1 else ''}"
    yield f"{result.model}, {result.parameters:,} parameters, on {on}{switches}"
    yield f"dtype: {result.dtype_text}"
    yield f"optimizer: {result.optimizer_text}"
    shapes = ", ".join(f"{name} {shape}" for name, shape in result.inputs.items())
    yield f"step: {result.options.schedule.microbatches} microbatches of {shapes}"
    yield (
        f"schedule: {result.options.schedule_name}, bubble {result.layout.bubble:.1%} with the work of these stages, "
        f"{result.layout.equal_bubble:.1%} with equal ones: at best {1 - result.layout.equal_bubble:.1%} of the ranks' "
        f"time"
    )


def _ranks(result: LayoutResult) -> list[str]:
    layout = result.layout
    whole = sum(rank.work for rank in layout.ranks)
    rows = []
    for number, rank in enumerate(layout.ranks):
        rows.append(_rank_row(number, rank, layout.stages, whole))
        if len(rank.stages) > 1:
            rows += [_stage_row(stage, layout.stages[stage], whole) for stage in rank.stages]
    heads = ("rank", "layers", "parameters", "work", "state", "activations", "memory")
    rows.append(_total_row(layout.ranks))
    return table(heads, rows, left=2, total=True)


def _rank_row(number: int, rank: RankSummary, stages: list[StageSummary], whole: float) -> list[str]:
    mark = "*" if rank.estimated else ""
    layers = str(rank.layers) if len(rank.stages) > 1 else _layers(stages[rank.stages[0]])
    return [
        f"{number}{mark}",
        layers,
        f"{rank.state.parameters:,}",
        _share(rank.work / whole),
        bytes_text(rank.state.total),
        bytes_text(rank.peak_activations),
        bytes_text(rank.memory),
    ]


def _stage_row(number: int, stage: StageSummary, whole: float) -> list[str]:
    mark = "*" if stage.estimated else ""
    return [
        f"  stage {number}{mark}",
        _layers(stage),
        f"{stage.state.parameters:,}",
        _share(stage.work / whole),
        bytes_text(stage.state.total),
        bytes_text(stage.peak_activations),
        "",
    ]


def _total_row(ranks: list[RankSummary]) -> list[str]:
    return [
        "total",
        str(sum(rank.layers for rank in ranks)),
        f"{sum(rank.state.parameters for rank in ranks):,}",
        "100 %",
        bytes_text(sum(rank.state.total for rank in ranks)),
        bytes_text(sum(rank.peak_activations for rank in ranks)),
        bytes_text(sum(rank.memory for rank in ranks)),
    ]


def _below(result: LayoutResult) -> Iterator[str]:
    layout, sizes = result.layout, result.options.sizes
    yield f"slowest: rank {layout.slowest}, {four_digits(layout.imbalance)} times the mean work"
    full = layout.ranks[layout.fullest]
    yield f"most memory: rank {layout.fullest}, {bytes_text(full.memory)}"
    transport = full.transport
    parts = f" + {bytes_text(transport)} of communicators and messages (on CUDA)" if transport else ""
    yield f"memory of a rank = state (weights, gradients, optimizer) + activations{parts}"
    if any(len(rank.stages) > 1 for rank in layout.ranks):
        yield "Stages of a rank may reach their peaks of activations at different times; their rank has the peak."
    if result.has_dimensions:
        yield f"Rows are of one rank. The total is of one pipeline; the job has {sizes.tensor * sizes.data} of them."


def _details(result: LayoutResult) -> list[str]:
    rows = [
        [
            f"{number}{'*' if stage.estimated else ''}",
            _digits(stage.forward / _TERA),
            _digits(stage.backward / _TERA),
            bytes_text(stage.state.weights),
            bytes_text(stage.state.gradients),
            bytes_text(stage.state.optimizer),
            str(stage.in_flight),
            f"{stage.sent_tensors}: {bytes_text(stage.sent_bytes)}",
        ]
        for number, stage in enumerate(result.layout.stages)
    ]
    heads = ("stage", "forward", "backward", "weights", "gradients", "optimizer", "held", "sent")
    return [
        *table(heads, rows),
        "forward, backward: TFLOPs of a microbatch. held: most microbatches in flight.",
        "sent: tensors and bytes that the forward of a microbatch sends to other stages.",
    ]


def _traffic(result: LayoutResult) -> list[str]:
    rows = []
    for number, stage in enumerate(result.layout.stages):
        traffic = stage.traffic
        sent = (traffic.tensor, traffic.average, traffic.reduce_scatter, traffic.all_gather)
        rows.append([str(number), *map(bytes_text, sent)])
    heads = ("stage", "tensor group", "gradient average", "reduce-scatter", "all-gather")
    return [
        *table(heads, rows),
        "Bytes that each rank of a stage sends in a step at least, by ring algorithms.",
    ]


def _digits(value: float) -> str:
    """Return ``value`` with four digits, in scientific notation where it is small."""
    return four_digits(value) if 0.001 <= value < 10_000 or not value else f"{value:.3e}"


def _layers(stage: StageSummary) -> str:
    if not stage.layers:
        return "0"
    first, last = (name.rpartition(".")[2] for name in (stage.layers[0], stage.layers[-1]))
    return f"{len(stage.layers)}: {first}..{last}" if len(stage.layers) > 1 else f"1: {first}"


def _share(share: float) -> str:
    return f"{100 * share:.2f} %"
