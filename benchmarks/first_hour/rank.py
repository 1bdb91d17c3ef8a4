"""A rank: it runs cases of a program in turn, and writes a line of JSON after each.

python -m benchmarks.first_hour.rank ORDER    # the variables are torchrun's
"""

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from benchmarks.first_hour.place import Found, Place, Rank, install


def main() -> None:
    """Run the cases of the order; an error ends the process."""
    # What started the rank asks for its stacks before it kills a rank that hangs.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    # Where an operation has no deterministic form, a warning tells why numbers may differ.
    torch.use_deterministic_algorithms(True, warn_only=True)
    place = Place(*order["place"])
    install(place.device)
    program = importlib.import_module(order["program"])
    rank = Rank(place, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), order["way"])
    with (Path(order["folder"]) / f"{rank.number}.jsonl").open("a") as file:
        for case in order["cases"]:
            began = time.monotonic()
            found: Found = program.run(rank, case)
            line = {"case": case, "seconds": round(time.monotonic() - began, 3), **found._asdict()}
            file.write(f"{json.dumps(line)}\n")
            file.flush()


if __name__ == "__main__":
    main()
