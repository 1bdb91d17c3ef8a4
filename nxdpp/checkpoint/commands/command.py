"""``python -m nxdpp checkpoint``: show a checkpoint, verify it, or convert it to a different format."""

import argparse
from pathlib import Path

from nxdpp.schedules.view.output import whole_number

_PATH = "a checkpoint, or the directory of a training's checkpoints, of which the newest is taken"
_ANY = f"{_PATH}; or a directory of Hugging Face, torch.distributed.checkpoint or NeuronX Distributed's ranks"
_FORMATS = ("nxdpp", "huggingface", "nxd", "dcp")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_EXAMPLES = """\
examples:
  python -m nxdpp checkpoint show out                  the newest checkpoint of a training, and a list of all
  python -m nxdpp checkpoint verify out/step_300       exit status 1 for a damaged one
  python -m nxdpp checkpoint convert out/step_300 model --to huggingface
  python -m nxdpp checkpoint convert model out/start --to nxdpp
  python -m nxdpp checkpoint convert out/step_300 whole --to dcp
  python -m nxdpp checkpoint convert model ranks --to nxd --tensor-parallel-size 2

docs/checkpoints.md has the output of each.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to ``python -m nxdpp``."""
    parser = commands.add_parser(
        "checkpoint",
        help="show, verify and convert checkpoints",
        description="Show, verify and convert checkpoints that save_checkpoint wrote. One process, no process group.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="print what a checkpoint has",
        description="Print step, layout, content and tensors of a checkpoint; and a line for each of a training.",
    )
    show.add_argument("path", metavar="PATH", type=Path, help=_ANY)
    show.add_argument("--json", action="store_true", help="print one JSON object, with sizes in bytes")
    verify = actions.add_parser(
        "verify",
        help="compare all checksums",
        description="Read a checkpoint and compare the checksum of each piece. Names each damaged tensor with its "
        "file. Exit status: 0 for a whole checkpoint, 1 for a damaged or unfinished one, 2 for another error. "
        "Files of other formats have no checksums: their headers and lengths are compared.",
    )
    verify.add_argument("path", metavar="PATH", type=Path, help=_ANY)
    verify.add_argument("--all", action="store_true", help="all checkpoints of a training, not the newest alone")
    _add_convert(actions)


def _add_convert(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    convert = actions.add_parser(
        "convert",
        help="write the model in another format",
        description="Write the model of a checkpoint in another format, tensor by tensor: the largest tensor is in "
        "memory, for dcp in a few copies, and no model. Sources: a checkpoint of nxdpp, a Hugging Face directory, "
        "files of NeuronX Distributed's ranks (nxd), a directory of torch.distributed.checkpoint (dcp). For dcp it is "
        "the flat state dict of one process, which torch.distributed.checkpoint.load and dcp_to_torch_save read. "
        "Values keep their dtypes.",
    )
    convert.add_argument("source", metavar="SOURCE", type=Path, help=f"{_PATH}; or a directory of the other formats")
    convert.add_argument("destination", metavar="DESTINATION", type=Path, help="a directory that has no checkpoint")
    convert.add_argument("--to", choices=_FORMATS, required=True, help="format of DESTINATION")
    convert.add_argument(
        "--config", type=Path, metavar="DIR", help="Hugging Face configuration of the model (that in SOURCE)"
    )
    convert.add_argument(
        "--with-optimizer",
        action="store_true",
        help="nxdpp to dcp, or back, with the optimizer's state, under the keys model and optimizer",
    )
    convert.add_argument(
        "--plain", action="store_true", help="the model is not of transformers: its tensors keep their names"
    )
    convert.add_argument(
        "--max-shard-size", type=_size, metavar="SIZE", help="largest file for --to huggingface, such as 500MB (1GB)"
    )
    convert.add_argument(
        "--blocks",
        action="store_true",
        help="files of ranks have fused weights, such as GPT-2's c_attn, in the blocks of tensor_parallelize",
    )
    for name in ("tensor", "pipeline"):
        convert.add_argument(
            f"--{name}-parallel-size", type=whole_number, default=1, metavar="N", help=f"{name} ranks, for --to nxd (1)"
        )


def run(options: argparse.Namespace) -> int:
    """Do the action of ``options``, and return the exit status: 1 for a damaged checkpoint of ``verify``.

    Raises ``ValueError`` for a path without a checkpoint, and for a source that does not fit a format.
    """
    if options.action == "convert":
        # transformers takes seconds to import.
        from nxdpp.checkpoint.commands.convert import convert

        convert(
            options.source,
            options.destination,
            options.to,
            config=options.config,
            tensor=options.tensor_parallel_size,
            pipeline=options.pipeline_parallel_size,
            blocks=options.blocks,
            plain=options.plain,
            largest=options.max_shard_size,
            optimizer=options.with_optimizer,
        )
        return 0
    from nxdpp.checkpoint.commands.show import show, verify

    if options.action == "verify":
        return verify(options.path, options.all)
    show(options.path, options.json)
    return 0


def _size(text: str) -> int:
    number, unit = text[:-2], text[-2:].upper()
    if unit not in _UNITS or not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number with a unit of {', '.join(_UNITS)}, such as 5GB")
    return int(number) * _UNITS[unit]
