"""``python -m nxdpp``: the stages of a model, schedules, checkpoints, and runs.

::

    python -m nxdpp plan CONFIG --pipeline-parallel-size 4 --num-microbatches 16
    python -m nxdpp schedule zb-v --ranks 4 --microbatches 8
    python -m nxdpp checkpoint show out
    python -m nxdpp watch out
"""

import argparse
import gc
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from nxdpp.checkpoint.commands import command as checkpoint_command
from nxdpp.planning import command as plan_command
from nxdpp.schedules.view import command as schedule_command
from nxdpp.version import __version__
from nxdpp.watching import command as watch_command

# Exit status of a process that SIGINT ends, as shells have it.
_INTERRUPTED = 130
# New objects between two collections, in place of some hundred.
_COLLECTED_AFTER = 100_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in ``arguments``, by default those of the process. Returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        status: int | None = options.run(options)
    except BrokenPipeError:
        # The reader of the pipe is gone: Python must not flush to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        # A terminal shows ^C at the start of the line.
        print(f"{chr(10) if sys.stderr.isatty() else ''}nxdpp {options.command}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except (ValueError, RuntimeError, OSError) as error:
        print(f"nxdpp {options.command}: {error}", file=sys.stderr)
        return 2
    return status or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nxdpp",
        description="Pipeline-parallel training of PyTorch models.",
        epilog="A job that hangs prints a line for each rank after hang_timeout: docs/guide/hangs.md reads them.",
    )
    parser.add_argument("--version", action="version", version=f"nxdpp {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in (plan_command, schedule_command, checkpoint_command, watch_command):
        command.add_parser(commands)
    return parser


def _run_process() -> NoReturn:
    """Run the command as the whole process.

    Imports of torch and transformers make about a million objects that stay. Python's collector visits them again and
    again, and once more at exit: a quarter of the time of a short command.
    """
    gc.set_threshold(_COLLECTED_AFTER)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal has no letters for is printed with escapes, as Python does on stderr.
        sys.stdout.reconfigure(errors="backslashreplace")
    status = main()
    gc.freeze()
    sys.exit(status)


if __name__ == "__main__":
    _run_process()
