"""Predictions for a given layout, and their text: a row for each rank, for each of its stages, and a total."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise

from nxdpp.counted import counted
from nxdpp.planning.layout_options import LayoutOptions
from nxdpp.planning.rank_summary import LayoutSummary, RankSummary
from nxdpp.planning.stage_summary import StageSummary
from nxdpp.planning.text_table import bytes_text, four_digits, paragraph, table

_HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class LayoutResult:
    """A layout of a model.

    Attributes:
        model: name of the model's class.
        parameters: number of its parameters, each once.
        dtype: of its parameters.
        named_dtype: dtype that the configuration names; ``None`` where it names none.
        inputs: shapes of a microbatch by name.
        options: the given layout.
        layout: its ranks and stages.
        notes: sentences about the figures.
    """

    model: str
    parameters: int
    dtype: str
    named_dtype: str | None
    inputs: Mapping[str, Sequence[int]]
    options: LayoutOptions
    layout: LayoutSummary
    notes: list[str] = field(default_factory=list)

    @property
    def has_dimensions(self) -> bool:
        """True with tensor groups or replicas."""
        return self.options.sizes.tensor > 1 or self.options.sizes.data > 1

    @property
    def dtype_text(self) -> str:
        """The dtype, the construction that gives it, and the flag for a different dtype."""
        if self.has_masters and self.options.sizes.is_sharded:
            policy = f"MixedPrecisionPolicy(param_dtype=torch.{self.dtype})"
            return f"float32, as {self.model}(config) makes it, and fully_shard(model, mp_policy={policy})"
        return dtype_text(self.model, self.dtype, self.options.dtype, self.named_dtype)

    @property
    def state_dtype(self) -> str:
        """Dtype of the optimizer's moments."""
        return "float32" if self.has_masters else self.dtype

    @property
    def has_masters(self) -> bool:
        """True if the optimizer keeps float32 master weights."""
        return self.options.sizes.zero > 0 and self.dtype in _HALF

    @property
    def optimizer_text(self) -> str:
        """The optimizer and its state."""
        masters = " and master weights" if self.has_masters else ""
        text = f"two moments{masters} of {self.state_dtype} per parameter"
        if self.options.sizes.zero:
            replicas = self.options.sizes.data
            name = (
                "AdamW over the shards of fully_shard" if self.options.sizes.is_sharded else "Zero1Optimizer over AdamW"
            )
            return f"{name}, {text}, divided over {counted(replicas, 'replica')}"
        return f"AdamW, {text}" + (", no float32 master weights" if self.dtype in _HALF else "")


def dtype_text(model: str, dtype: str, given: str | None, named: str | None) -> str:
    """Return the dtype of a plan, the construction that gives it, and the flag for a different dtype.

    Args:
        model: name of the model's class.
        dtype: of its parameters.
        given: value of ``--dtype``, or ``None``.
        named: dtype of the configuration, or ``None``.
    """
    if given is not None:
        return f"{dtype}, by --dtype: {model}(config).to(torch.{dtype})"
    text = f"{dtype}, as {model}(config) makes it"
    if named in (None, dtype):
        return f"{text}; --dtype plans for another"
    return f"{text}. The configuration names {named}, which its constructor does not read: --dtype {named} plans for it"


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
    on = counted(ranks, "rank")
    if result.has_dimensions:
        on = f"{sizes.tensor} tensor x {ranks} pipeline x {sizes.data} data ranks"
    switches = f"{', sequence parallel' if sizes.sequence else ''}{f', ZeRO-{sizes.zero}' if sizes.zero else ''}"
    yield f"{result.model}, {result.parameters:,} parameters, on {on}{switches}"
    yield f"dtype: {result.dtype_text}"
    yield f"optimizer: {result.optimizer_text}"
    shapes = ", ".join(f"{name} {shape}" for name, shape in result.inputs.items())
    yield f"step: {counted(result.options.schedule.microbatches, 'microbatch')} of {shapes}"
    waits = f"bubble {result.layout.bubble:.1%} (share of a step in which ranks wait)"
    yield f"schedule: {result.options.schedule_name}, {waits}"


def _ranks(result: LayoutResult) -> list[str]:
    layout = result.layout
    whole = sum(rank.work for rank in layout.ranks)
    places = _places(layout.stages)
    rows = []
    for number, rank in enumerate(layout.ranks):
        layers = str(rank.layers) if len(rank.stages) > 1 else _layers(places[rank.stages[0]])
        rows.append(_row(f"{number}", layers, rank, whole, bytes_text(rank.memory)))
        if len(rank.stages) > 1:
            rows += [_row(f"  stage {n}", _layers(places[n]), layout.stages[n], whole, "") for n in rank.stages]
    rows.append(
        [
            "total",
            str(sum(rank.layers for rank in layout.ranks)),
            f"{sum(rank.state.parameters for rank in layout.ranks):,}",
            "100 %",
            bytes_text(sum(rank.state.total for rank in layout.ranks)),
            bytes_text(sum(rank.peak_activations for rank in layout.ranks)),
            bytes_text(sum(rank.memory for rank in layout.ranks)),
        ]
    )
    heads = ("rank", "layers", "parameters", "work", "state", "activations", "memory")
    return table(heads, rows, left=2, total=True)


def _row(name: str, layers: str, of: RankSummary | StageSummary, whole: float, memory: str) -> list[str]:
    return [
        f"{name}{'*' if of.estimated else ''}",
        layers,
        f"{of.state.parameters:,}",
        f"{100 * of.work / whole:.2f} %",
        bytes_text(of.state.total),
        bytes_text(of.peak_activations),
        memory,
    ]


def _below(result: LayoutResult) -> Iterator[str]:
    layout, sizes = result.layout, result.options.sizes
    if len(runs := _runs(layout.stages)) > 1:
        yield f"layers: {', '.join(runs)}"
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
        f"bubble with stages of equal work: {result.layout.equal_bubble:.1%}",
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


def _places(stages: list[StageSummary]) -> list[range]:
    """Return the numbers of each stage's layers, in the order of execution."""
    ends = list(accumulate((len(stage.layers) for stage in stages), initial=0))
    return [range(start, end) for start, end in pairwise(ends)]


def _layers(places: range) -> str:
    if len(places) < 2:
        return f"1: {places[0]}" if places else "0"
    return f"{len(places)}: {places[0]}..{places[-1]}"


def _runs(stages: list[StageSummary]) -> list[str]:
    """Return the numbers of the layers of each list of the model, such as ``0..3 encoder.block``."""
    names = [name.rpartition(".")[0] for stage in stages for name in stage.layers]
    found = []
    for name, run in groupby(enumerate(names), key=lambda each: each[1]):
        places = [place for place, _ in run]
        found.append(f"{places[0]}..{places[-1]} {name}" if len(places) > 1 else f"{places[0]} {name}")
    return found
