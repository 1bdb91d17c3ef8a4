"""``python -m nxdpp plan``: the stages of a given layout, or with ``--devices`` the best layouts of a job."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nxdpp.pipeline.planning.search_command import add_search_arguments, check_no_search, run_search

if TYPE_CHECKING:
    from rich.table import Table

    from nxdpp.pipeline.planning.dimensions import Dimensions
    from nxdpp.pipeline.planning.stage_summary import StageSummary

_GIB = 2**30


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to ``python -m nxdpp``."""
    parser = commands.add_parser(
        "plan",
        help="print the best layouts of a job, or work and memory of each stage of one",
        description="With --devices: search the layouts with the shortest steps. Without: print work, memory and sent "
        "bytes of each stage of a pipeline. No weights are allocated.",
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="Hugging Face configuration file, or its folder")
    parser.add_argument("--pipeline-parallel-size", type=_count, metavar="N", help="ranks of a pipeline")
    parser.add_argument("--num-microbatches", type=_count, metavar="N", help="microbatches of a step")
    parser.add_argument("--virtual-pipeline-size", type=_count, metavar="N", help="stages of a rank (1)")
    parser.add_argument(
        "--batch-size", type=_count, metavar="N", help="samples of a replica in a step (one a microbatch)"
    )
    parser.add_argument(
        "--seq-length", type=_count, metavar="N", help="length of a sequence (2048 tokens, or all positions)"
    )
    parser.add_argument("--partition", choices=("even", "balanced"), default="even", help="choice of the cuts (even)")
    parser.add_argument("--memory-limit", type=float, metavar="GIB", help="GiB of a rank, for --partition balanced")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu", "a100", "h100", "h200"),
        default="cuda",
        help="device of the ranks: on cuda a memory limit counts communicators and messages (cuda, h100 in a search)",
    )
    parser.add_argument("--dtype", metavar="NAME", help="of the model: bfloat16 (the configuration's, or float32)")
    parser.add_argument("--tensor-parallel-size", type=_count, metavar="N", help="ranks that divide each layer (1)")
    parser.add_argument("--data-parallel-size", type=_count, metavar="N", help="data-parallel replicas (1)")
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="the tensor group divides the sequence between linear layers"
    )
    parser.add_argument("--zero1", action="store_true", help="the replicas share the optimizer state")
    add_search_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the best layouts with ``--devices``, else the table of stages.

    Raises ``ValueError`` for options that do not fit together or do not fit the model.
    """
    if options.devices is not None:
        run_search(options)
        return
    check_no_search(options)
    import torch

    from nxdpp.pipeline.planning.configured_model import build_on_meta, microbatch_on_meta, read_configuration
    from nxdpp.pipeline.planning.dimensions import Dimensions, divided
    from nxdpp.pipeline.planning.dtypes import dtype_named, name_of
    from nxdpp.pipeline.planning.stage_summary import summarise_stages

    microbatches = options.num_microbatches
    batch = options.batch_size or microbatches
    if batch % microbatches:
        raise ValueError(
            f"a batch of {batch} does not divide into {microbatches} microbatches. Use a multiple of {microbatches}."
        )
    sizes = Dimensions(
        options.tensor_parallel_size or 1, options.data_parallel_size or 1, options.zero1, options.sequence_parallel
    )
    config = read_configuration(options.config)
    if options.dtype is not None:
        config.dtype = dtype_named(options.dtype)
    model = build_on_meta(config)
    inputs = microbatch_on_meta(model, batch // microbatches, options.seq_length)
    sizes.check_length(inputs)
    limit = None if options.memory_limit is None else int(options.memory_limit * _GIB)
    ranks = options.pipeline_parallel_size
    balanced = options.partition == "balanced"
    with divided(model, sizes):
        stages = summarise_stages(
            model,
            inputs,
            ranks,
            microbatches,
            balanced,
            limit,
            options.virtual_pipeline_size or 1,
            torch.device("cpu" if options.device == "cpu" else "cuda"),
            sizes,
        )
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in inputs.items())
    title = f"{type(model).__name__} in {name_of(model.dtype)}, {microbatches} microbatches of {shapes}"
    _show(title, stages, ranks, sizes)


def _show(title: str, stages: "Sequence[StageSummary]", ranks: int, sizes: "Dimensions") -> None:
    from rich.console import Console
    from rich.table import Table

    # A row for each stage.
    chunked = len(stages) > ranks
    table = Table("stage (rank)" if chunked else "stage", "layers", title=title)
    optimizer = "ZeRO-1 AdamW" if sizes.zero1 else "AdamW"
    for name in (
        "parameters", "TFLOPs forward", "TFLOPs backward", "work / mean", "weights", "gradients", optimizer,
        "peak activations", "sent tensors", "sent bytes",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    mean = sum(stage.work for stage in stages) / len(stages)
    for index, stage in enumerate(stages):
        mark = " *" if stage.estimated else ""
        table.add_row(
            f"{index} ({index % ranks})" if chunked else str(index),
            f"{len(stage.layers)}: {_short(stage.layers[0])}..{_short(stage.layers[-1])}" if stage.layers else "0",
            f"{stage.state.parameters:,}",
            f"{stage.forward / 1e12:.4g}{mark}",
            f"{stage.backward / 1e12:.4g}{mark}",
            f"{stage.work / mean:.3f}{mark}",
            _bytes(stage.state.weights),
            _bytes(stage.state.gradients),
            _bytes(stage.state.optimizer),
            f"{_bytes(stage.peak_activations)}{mark}",
            str(stage.sent_tensors),
            _bytes(stage.sent_bytes),
        )
    # The table. A script that reads the output needs whole lines.
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    if sizes.tensor > 1 or sizes.data > 1:
        console.print(_dimensions_table(stages, ranks, sizes))
    # Notes below it.
    slowest = max(sum(stage.work for stage in stages[rank::ranks]) for rank in range(ranks))
    unit = "rank" if chunked else "stage"
    console.print(f"slowest {unit} / mean: {slowest / (mean * len(stages) / ranks):.3f}")
    if any(stage.estimated for stage in stages):
        console.print("* estimated from the parameters: layers of this stage cannot run without data")
    if sizes.tensor > 1 or sizes.data > 1:
        console.print("Columns are of one rank; ring algorithms send the bytes of a step, and padding is left out.")
    console.print("FLOPs, and tensors sent in the forward, are of one microbatch; activations are peaks under 1F1B.")
    if chunked:
        console.print("1F1B is interleaved; the stages of a rank may reach their peaks at different times.")
    if stages[0].transport:
        console.print(
            f"communicators and messages: {_bytes(stages[0].transport)} of each rank, on CUDA; a memory limit counts "
            f"them"
        )
    console.print(
        "Work of an operation: its FLOPs, or the FLOPs that an accelerator could do while it moves the bytes, if more."
    )


def _dimensions_table(stages: "Sequence[StageSummary]", ranks: int, sizes: "Dimensions") -> "Table":
    """A row for each stage: memory, and the bytes that each of its ranks sends in a step."""
    from rich.table import Table

    world = f"{sizes.tensor} tensor x {ranks} pipeline x {sizes.data} data"
    kinds = f"{', sequence parallel' if sizes.sequence else ''}{', ZeRO-1' if sizes.zero1 else ''}"
    table = Table("stage", title=f"each rank, {world}{kinds}: bytes sent in a step")
    for name in ("memory", "tensor group", "gradient average", "reduce-scatter", "all-gather"):
        table.add_column(name, justify="right")
    for index, stage in enumerate(stages):
        traffic = stage.traffic
        sent = (traffic.tensor, traffic.average, traffic.reduce_scatter, traffic.all_gather)
        mark = " *" if stage.estimated else ""
        table.add_row(str(index), f"{_bytes(stage.memory)}{mark}", *map(_bytes, sent))
    return table


def _short(layer: str) -> str:
    return layer.rpartition(".")[2]


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value
