"""On one host no socket of a rank can be reached from another host."""

import os
import re
import subprocess
import sys

import torch
import torch.distributed as dist

from nxdpp.ranks import parallel_state

LOOPBACK = "0100007F"


def listen_and_tell() -> None:
    """Print the addresses on which this rank listens, as in ``/proc/net/tcp``."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, backend="gloo")
    dist.all_reduce(torch.ones(1), group=parallel_state.get_pipeline_model_parallel_group())
    own = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)}
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as file:
            rows = [line.split() for line in file][1:]
        for row in rows:
            if row[3] == "0A" and f"socket:[{row[9]}]" in own:
                print(f"listens on {row[1]}", flush=True)
    dist.barrier()
    parallel_state.destroy_model_parallel()


def test_ranks_of_one_host_listen_on_loopback_alone() -> None:
    """Without torchrun, so that rank 0 has the store."""
    environment = {
        **os.environ,
        **{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29713"},
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    environment.pop("GLOO_SOCKET_IFNAME", None)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", __spec__.name],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        output, _ = process.communicate(timeout=120)
        addresses = re.findall(r"listens on (\w+):\w+", output)
        assert process.returncode == 0, output
        assert len(addresses) >= 2 + (rank == 0), output
        assert set(addresses) == {LOOPBACK}, output


if __name__ == "__main__":
    listen_and_tell()
