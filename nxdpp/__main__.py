"""``python -m nxdpp``: the stages of a model, schedules, and recorded timelines.

::

    python -m nxdpp plan CONFIG --pipeline-parallel-size 4 --num-microbatches 16
    python -m nxdpp schedule zb-v --ranks 4 --microbatches 8
    python -m nxdpp timeline trace.json
"""

import argparse
import os
import sys
from collections.abc import Sequence

from nxdpp.pipeline.planning import command as plan_command
from nxdpp.schedules.view import command as schedule_command
from nxdpp.schedules.view import timeline_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in ``arguments``, by default those of the process. Returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        options.run(options)
    except (ValueError, RuntimeError) as error:
        print(f"nxdpp {options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of the pipe is gone: Python must not flush to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nxdpp", description="Pipeline-parallel training of PyTorch models."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in (plan_command, schedule_command, timeline_command):
        command.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
