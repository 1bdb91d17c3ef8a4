"""Flags of train.py, each checked by itself, without torch."""

import argparse
import math
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from first_ctrl_c import rank

from nxdpp.schedules.families.registry import FAMILIES

# Dtypes of the forward.
DTYPES = ("float32", "bfloat16")

# Ways to choose the cuts between stages: equal numbers of layers, counted costs, measured costs.
PARTITIONS = ("even", "balanced", "profiled")

# When --shard gathers the weights of a layer: once a step, or for each microbatch.
SHARDS = ("once", "microbatch")

# The device of each process; "auto" is a CUDA device where there is one, and else the CPU.
DEVICES = ("auto", "cpu", "cuda", "xla")

# Folder of the training's checkpoints in the output folder.
CHECKPOINTS = "checkpoints"
AUTO = "auto"
KEPT = 3
# What a save does while the previous one is in flight.
BUSY = ("wait", "skip")
# After a save that failed.
END, GO_ON = "end", "go-on"


class _Parser(argparse.ArgumentParser):
    """Argument parser that raises its errors, and prints its help only on rank 0."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists the flags)")

    def print_help(self, file: object = None) -> None:
        if rank() == 0:
            print(self.format_help(), end="")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser. It raises ``ValueError`` for wrong flags."""
    parser = _Parser(
        prog="train.py",
        allow_abbrev=False,
        description="Train a byte-level Llama on text, on one process or as a pipeline under torchrun.",
        epilog="Defaults are in brackets.",
    )
    # The model and the data.
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE.json",
        help="a Hugging Face config.json of the Llama to train; without it, one of about 5 M parameters",
    )
    parser.add_argument(
        "--pretrained",
        type=Path,
        metavar="DIR",
        help="train the weights of a Hugging Face folder (config.json, *.safetensors) instead of random ones",
    )
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="the text to train on, read as bytes; without it, the source files of the Python standard library. "
        "Held out: every twentieth file, of 2 to 19 files the last, of one file its last twentieth",
    )
    # The training.
    parser.add_argument("--steps", type=_at_least(1), default=240, help="optimizer steps [%(default)s]")
    parser.add_argument(
        "--batch-size", type=_at_least(1), default=8, help="sequences in a step, over all ranks [%(default)s]"
    )
    parser.add_argument("--seq-length", type=_at_least(2), default=128, help="bytes in a sequence [%(default)s]")
    parser.add_argument(
        "--num-microbatches",
        type=_at_least(1),
        default=8,
        help="microbatches of each data-parallel replica [%(default)s]",
    )
    parser.add_argument(
        "--learning-rate",
        type=_above_zero,
        default=1.5e-3,
        help="peak; it rises for a tenth of the steps and then falls on a cosine to a twentieth [%(default)s]",
    )
    parser.add_argument(
        "--max-grad-norm",
        type=_above_zero,
        default=1.0,
        metavar="NORM",
        help="gradients of a larger norm, that of the whole model, are scaled down to it [%(default)s]",
    )
    parser.add_argument(
        "--seed", type=_at_least(0), default=0, help="seed of the initial weights and the batches [%(default)s]"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="dtype of the forward: bfloat16 is autocast, weights and optimizer stay float32 [%(default)s]",
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default=AUTO,
        help="device of each process: auto is a CUDA device where there are some, else the CPU; xla is that of "
        "PJRT_DEVICE, over torch_xla [%(default)s]",
    )
    # The output and the processes.
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/llama"),
        metavar="DIR",
        help="folder of metrics.jsonl and the checkpoint; those of an earlier run are replaced when this one saves "
        "[%(default)s]",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=_at_least(1),
        metavar="N",
        help="save the training after every N steps and after the last one, to resume from [never]",
    )
    parser.add_argument(
        "--checkpoint-dir",
        type=Path,
        metavar="DIR",
        help="folder of these checkpoints, step_N each [OUTPUT/checkpoints]",
    )
    parser.add_argument(
        "--checkpoint-keep",
        type=_at_least(1),
        metavar="N",
        help=f"number of the newest checkpoints that are kept [{KEPT}]",
    )
    parser.add_argument(
        "--checkpoint-async",
        nargs="?",
        const=BUSY[0],
        choices=BUSY,
        help="hold a step for the copy to host memory alone, and write in the background. A checkpoint that is due "
        "while the one before is written waits for it, or is skipped [no; wait without a value]",
    )
    parser.add_argument(
        "--checkpoint-errors",
        choices=(END, GO_ON),
        help=f"after a checkpoint that cannot be written, as on a full disk: end, or go on training [{END}]",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const=AUTO,
        type=_auto_or_path,
        metavar="auto|PATH",
        help="resume from the newest checkpoint in --checkpoint-dir, and from the start without one (auto, also "
        "without a value), or from the directory PATH of one checkpoint [no]",
    )
    parser.add_argument(
        "--pipeline-parallel-size",
        type=_at_least(1),
        metavar="N",
        help="stages of a pipeline; further processes are replicas [all processes]",
    )
    parser.add_argument(
        "--schedule",
        metavar="NAME|FILE.csv",
        help=f"schedule of the microbatches: {', '.join(FAMILIES)}, or a CSV file of actions "
        "[1f1b, and interleaved with several stages per process]",
    )
    parser.add_argument(
        "--virtual-pipeline-size",
        type=_at_least(1),
        default=1,
        metavar="N",
        help="stages of each process; 1 leaves the number to the schedule [%(default)s]",
    )
    parser.add_argument(
        "--partition",
        choices=PARTITIONS,
        default=PARTITIONS[0],
        help="cut into stages of equally many layers, by counted or by measured cost [%(default)s]",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=_at_least(1),
        default=1,
        metavar="N",
        help="processes that share each layer [%(default)s]",
    )
    parser.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="divide the activations between the linear layers too, over the processes that share a layer [no]",
    )
    parser.add_argument(
        "--zero1", action="store_true", help="divide the optimizer's state over the data-parallel replicas [no]"
    )
    parser.add_argument(
        "--shard",
        nargs="?",
        const=SHARDS[0],
        choices=SHARDS,
        help="divide weights, gradients and the optimizer's state over the data-parallel replicas (FSDP): gather each "
        "layer once a step, or for each microbatch, with the least memory [no; once without a value]",
    )
    # The figures.
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.json",
        help="write a Chrome trace of each step, which https://ui.perfetto.dev opens [no]",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="at the end measure steps of the unwrapped model on one process, which must have memory for it [no]",
    )
    return parser


def read_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the flags in ``arguments``. Raises ``ValueError`` for wrong ones, and names the closest to an unknown."""
    flags, unknown = make_parser().parse_known_args(arguments)
    if unknown:
        names = [f"--{name.replace('_', '-')}" for name in vars(flags)]
        given = [argument.partition("=")[0] for argument in unknown if argument.startswith("--")]
        close = dict.fromkeys(found for each in given for found in get_close_matches(each, names, 1))
        meant = f"did you mean {', '.join(close)}? " if close else ""
        raise ValueError(f"unrecognized arguments: {' '.join(unknown)} ({meant}--help lists the flags)")
    return flags


def _at_least(smallest: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = smallest - 1
        if not smallest <= number < 2**63:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {smallest}")
        return number

    return whole_number


def _auto_or_path(text: str) -> str | Path:
    return AUTO if text == AUTO else Path(text)


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number
