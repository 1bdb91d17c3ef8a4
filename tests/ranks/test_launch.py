"""On one host no socket of a rank can be reached from another host."""

import os
import re

import pytest
import torch
import torch.distributed as dist

from nxdpp.ranks import parallel_state
from tests.support.run_program import run_program

LOOPBACK = "0100007F"


def listen_and_tell() -> None:
    """Print the addresses on which this rank listens, as in ``/proc/net/tcp``."""
    os.environ["MASTER_ADDR"] = "localhost"
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


def test_ranks_of_one_host_listen_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun, so that rank 0 has the store."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    ended = run_program(__file__, [], 2, first_rank_has_store=True, own_outputs=True)
    assert ended.codes == [0, 0], ended.output
    for rank, output in enumerate(ended.outputs):
        addresses = re.findall(r"listens on (\w+):\w+", output)
        assert len(addresses) >= 2 + (rank == 0), output
        assert set(addresses) == {LOOPBACK}, output


if __name__ == "__main__":
    listen_and_tell()
