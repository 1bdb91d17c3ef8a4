"""``python -m nxdpp watch`` and ``report``: a run in the terminal and as a page.

::

    python -m nxdpp watch out
    python -m nxdpp watch out --web
    python -m nxdpp report out
"""

import argparse
import sys
import time
from contextlib import suppress
from pathlib import Path

from nxdpp.watching.metrics_reader import RunMetrics
from nxdpp.watching.summary import summary_of

_PORT = 8931
_SECONDS = 1.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add both commands to ``python -m nxdpp``."""
    watch = commands.add_parser(
        "watch",
        help="show a run while it trains, or afterwards",
        description="Show the metrics that nxdpp.MetricsFile(FOLDER, model) writes: loss, tokens a second, busy share "
        "and memory of each rank, a step as a strip, faults, and experts. It only reads files, also over ssh and after "
        "the run. Ctrl-C ends it.",
    )
    watch.add_argument("folder", metavar="FOLDER", type=Path, help="the run's folder")
    watch.add_argument("--once", action="store_true", help="print one frame and end; also where there is no terminal")
    watch.add_argument("--web", action="store_true", help="serve a page; every user of this machine can read it")
    watch.add_argument("--port", type=int, metavar="N", help=f"port of the page ({_PORT}); 0 for any that is free")
    watch.set_defaults(run=run_watch)
    report = commands.add_parser(
        "report",
        help="write a run as a page in one file",
        description="Write the page of `watch --web` with the run in it, as one HTML file.",
    )
    report.add_argument("folder", metavar="FOLDER", type=Path, help="the run's folder")
    report.add_argument("--output", metavar="FILE", type=Path, help="the file (FOLDER/report.html)")
    report.set_defaults(run=run_report)


def run_watch(options: argparse.Namespace) -> None:
    """Show the run of ``options``; ``ValueError`` for a folder without metrics, or flags that do not fit."""
    if options.port is not None and not options.web:
        raise ValueError("--port needs --web: add it, or leave out --port.")
    if options.once and options.web:
        raise ValueError("--once prints to the terminal: leave out --web. For a page of this moment call report.")
    if options.port is not None and not 0 <= options.port < 2**16:
        raise ValueError(f"--port {options.port}: give a number from 0 to {2**16 - 1}.")
    run = RunMetrics(options.folder)
    with suppress(KeyboardInterrupt):
        if options.web:
            _serve(run, _PORT if options.port is None else options.port)
        else:
            _show(run, options.once)


def run_report(options: argparse.Namespace) -> None:
    """Write the page; ``ValueError`` for a folder without metrics."""
    from nxdpp.watching.page import page

    file = options.output or options.folder / "report.html"
    text = page(summary_of(RunMetrics(options.folder), time.time()))
    file.write_text(text, encoding="utf-8")
    print(file)


def _show(run: RunMetrics, once: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    from nxdpp.schedules.view.output import console as plain_console
    from nxdpp.watching.frame import frame

    console: Console = plain_console(None)
    if once or not console.is_terminal or console.is_dumb_terminal:
        console.print(frame(summary_of(run, time.time()), console))
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(frame(summary_of(run, time.time()), console), refresh=True)
            time.sleep(_SECONDS)
            run.read_on()


def _serve(run: RunMetrics, port: int) -> None:
    from nxdpp.watching.page import server

    try:
        served = server(run, port)
    except OSError as error:
        raise ValueError(f"--port {port}: {error.strerror}. Give another --port, or 0 for any that is free.") from None
    with served:
        number = served.server_address[1]
        print(f"http://127.0.0.1:{number}/", flush=True)
        print(
            f"only for browsers of this machine; from another one: ssh -L {number}:127.0.0.1:{number} HOST",
            file=sys.stderr,
            flush=True,
        )
        served.serve_forever()
