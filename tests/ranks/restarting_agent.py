"""torchrun's agent of a program on two ranks, called as torchrun calls it.

Run as ``restarting_agent.py PROGRAM FOLDER FAULT ...``, with a restart for each fault. The ranks are forks of this
process, which has done the imports.
"""

import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.support.run_program import run_script, take_signals_of_a_program


def run(program: str, *arguments: str) -> None:
    """Run ``program`` as an interpreter does, and end with its exit status."""
    take_signals_of_a_program()
    sys.exit(run_script(program, arguments))


if __name__ == "__main__":
    configuration = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="job",
        max_restarts=len(sys.argv) - 3,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(configuration, run)(*sys.argv[1:])
