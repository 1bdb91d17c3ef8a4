"""``python -m nxdpp checkpoint``: what a checkpoint has, whether it is whole, and other formats of it.

::

    python -m nxdpp checkpoint show out                 the newest checkpoint of a training, or out/step_300
    python -m nxdpp checkpoint verify out/step_300      exit status 1 for a damaged one
    python -m nxdpp checkpoint convert out/step_300 model --to huggingface
    python -m nxdpp checkpoint convert model ranks --to nxd --tensor-parallel-size 2
"""

import argparse
from pathlib import Path

_PATH = "a checkpoint, or the directory of a training's checkpoints, of which the newest is taken"
_FORMATS = ("nxdpp", "huggingface", "nxd")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to those of ``python -m nxdpp``."""
    parser = commands.add_parser(
        "checkpoint",
        help="show, verify and convert checkpoints",
        description="Show, verify and convert checkpoints that save_checkpoint wrote. One process, no process group.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser(
        "show", help="print what a checkpoint has", description="Print layout, content and tensors of a checkpoint."
    )
    show.add_argument("path", metavar="PATH", type=Path, help=_PATH)
    show.set_defaults(run=run_show)
    verify = actions.add_parser(
        "verify",
        help="compare all checksums",
        description="Read a checkpoint and compare the checksum of each piece. Names each damaged tensor with its "
        "file. Exit status: 0 for a whole checkpoint, 1 for a damaged or unfinished one, 2 for another error.",
    )
    verify.add_argument("path", metavar="PATH", type=Path, help=_PATH)
    verify.set_defaults(run=run_verify)
    _add_convert(actions)


def _add_convert(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    convert = actions.add_parser(
        "convert",
        help="write the model in another format",
        description="Write the model of a checkpoint in another format, tensor by tensor: the largest tensor is in "
        "memory, and no model. Sources: a checkpoint of nxdpp, a Hugging Face directory, files of NeuronX "
        "Distributed's ranks (nxd). From the last two comes a checkpoint with a model alone. Values keep their dtypes.",
    )
    convert.add_argument("source", metavar="SOURCE", type=Path, help=f"{_PATH}; or a directory of the other formats")
    convert.add_argument("destination", metavar="DESTINATION", type=Path, help="a directory that has no checkpoint")
    convert.add_argument("--to", choices=_FORMATS, required=True, help="format of DESTINATION")
    convert.add_argument(
        "--config", type=Path, metavar="DIR", help="Hugging Face configuration of the model (that in SOURCE)"
    )
    for name in ("tensor", "pipeline"):
        convert.add_argument(
            f"--{name}-parallel-size", type=_count, default=1, metavar="N", help=f"{name} ranks, for --to nxd (1)"
        )
    convert.set_defaults(run=run_convert)


def run_show(options: argparse.Namespace) -> int:
    """Print what a checkpoint has. Raises ``ValueError`` for a path without one, and for a damaged document."""
    from nxdpp.checkpoint.commands.opened import opened
    from nxdpp.checkpoint.commands.show import show

    show(*opened(options.path))
    return 0


def run_verify(options: argparse.Namespace) -> int:
    """Compare all checksums, and return 0 for a whole checkpoint and 1 for another one."""
    from nxdpp.checkpoint.commands.verify import verify

    return verify(options.path)


def run_convert(options: argparse.Namespace) -> int:
    """Write the model in another format. Raises ``ValueError`` for a source that does not fit the format."""
    from nxdpp.checkpoint.commands.convert import convert

    sizes = options.tensor_parallel_size, options.pipeline_parallel_size
    convert(options.source, options.destination, options.to, options.config, *sizes)
    return 0


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value
