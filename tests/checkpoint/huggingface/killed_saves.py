"""Loop of saves over one directory, killed with SIGKILL at random moments: does a checkpoint load each time?

    python -m tests.checkpoint.huggingface.killed_saves --ranks 4 --kills 100

The kill is of all ranks, or of one that is drawn: the others then end, or are killed 2 seconds later.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not in its __all__
from transformers import LlamaForCausalLM

from nxdpp import save_pretrained
from tests.checkpoint.huggingface.checkpointed_models import make, wrap
from tests.support.run_ranks import fork_server, rank_environment

_SECONDS = 60.0
# Longest time between the first finished save and a kill: several saves.
_LONGEST = 0.5


def kill_saves(directory: Path, ranks: int, kills: int, seed: int) -> list[bool]:
    """Return for each kill whether one complete checkpoint loads from ``directory`` after it."""
    draw = random.Random(seed)
    outcomes = []
    for number in range(kills):
        _kill_once(directory / "checkpoint", directory / "saved", ranks, number, draw)
        outcomes.append(_loads(directory / "checkpoint"))
    return outcomes


def _kill_once(directory: Path, saved: Path, ranks: int, number: int, draw: random.Random) -> None:
    saved.unlink(missing_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environments = [rank_environment(rank, ranks, store.port) for rank in range(ranks)]
    processes = [
        fork_server().Process(target=_save_forever, args=(environment, directory, saved, number))
        for environment in environments
    ]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + _SECONDS
        while not saved.exists():
            if time.monotonic() > deadline or not all(process.is_alive() for process in processes):
                raise AssertionError(f"a rank ended, or no save finished in {_SECONDS} s")
            time.sleep(0.005)
        time.sleep(draw.uniform(0, _LONGEST))
        for process in draw.choice([processes, [draw.choice(processes)]]):
            process.kill()
        end = time.monotonic() + 2.0
        for process in processes:
            wait([process.sentinel], max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.join()


def _save_forever(environment: dict[str, str], directory: Path, saved: Path, number: int) -> None:
    """Save a model whose values are all one number, a new one for each save."""
    signal.alarm(int(_SECONDS))
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.environ.update(environment)
    torch.set_num_threads(1)
    wrapped = wrap(make("llama"), int(environment["WORLD_SIZE"]))
    count = 0
    while True:
        count += 1
        for tensor in wrapped.local_parameters():
            tensor.data.fill_(1000 * number + count)
        save_pretrained(wrapped, directory)
        saved.touch()


def _loads(directory: Path) -> bool:
    try:
        model: Any = LlamaForCausalLM.from_pretrained(directory)
    except (OSError, ValueError) as error:
        print(f"{directory}: {error}", flush=True)
        return False
    values = {value for parameter in model.parameters() for value in parameter.unique().tolist()}
    return len(values) == 1


def main(arguments: Sequence[str]) -> None:
    """Print the number of kills after which a checkpoint loads; exit with 1 unless all do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="nxdpp-kills-") as folder:
        outcomes = kill_saves(Path(folder), given.ranks, given.kills, given.seed)
    print(f"{outcomes.count(True)} of {given.kills} kills over {given.ranks} ranks left one complete checkpoint")
    sys.exit(not all(outcomes))


if __name__ == "__main__":
    main(sys.argv[1:])
