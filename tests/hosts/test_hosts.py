"""Agents of torchrun with a c10d rendezvous, on network namespaces joined by a bridge."""

import re
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.hosts.trained_program import losses_of_one_process
from tests.support.hosts import Host, agent, hosts_on_one_machine, reason_against

TESTS = Path(__file__).parents[1]
START_SECONDS = 200.0
# Measured: below 0.5 s.
BOUND_SECONDS = 20.0


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    if reason := reason_against():
        pytest.skip(f"no network namespaces here: {reason}")
    with hosts_on_one_machine(2) as made:
        yield made


class _Agents:
    """An agent on each host, with what the host's processes wrote."""

    def __init__(
        self, hosts: list[Host], ranks: int, folder: Path, program: Sequence[str], options: Sequence[str] = ()
    ) -> None:
        self._hosts = hosts
        self._files = [folder / f"host{number}.txt" for number in range(len(hosts))]
        self.processes: list[BaseProcess] = []
        for number, (host, file) in enumerate(zip(hosts, self._files, strict=True)):
            arguments = agent(number, len(hosts), ranks, [str(TESTS / program[0]), *program[1:]], *options)
            self.processes.append(host.start(arguments, file))

    @property
    def outputs(self) -> list[str]:
        return [file.read_text(errors="replace") if file.exists() else "" for file in self._files]

    def end_well(self) -> str:
        """Wait until both agents have ended with status 0, and return what all processes wrote."""
        for process in self.processes:
            process.join(START_SECONDS)
            assert process.exitcode == 0, "\n".join(self.outputs)
        return "".join(self.outputs)

    def processes_of_ranks(self, ranks: int) -> dict[int, int]:
        """Return the process of each rank, by its number on this machine, once all have started."""
        deadline = time.monotonic() + START_SECONDS
        while len(re.findall(r"rank \d is process", "".join(self.outputs))) < ranks:
            assert time.monotonic() < deadline, self.outputs
            assert all(process.is_alive() for process in self.processes), self.outputs
            time.sleep(0.1)
        return {
            int(rank): host.processes()[int(process)]
            for host, output in zip(self._hosts, self.outputs, strict=True)
            for rank, process in re.findall(r"rank (\d) is process (\d+)", output)
        }


def test_losses_are_those_of_one_process_also_over_a_slow_link(hosts: list[Host], tmp_path: Path) -> None:
    output = _Agents(hosts, 1, tmp_path, ["hosts/trained_program.py"]).end_well()
    assert re.findall(r"losses (\[.*\])", output) == [str(losses_of_one_process())]


def test_both_hosts_restart_after_a_fault_on_one(hosts: list[Host], tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    noted.mkdir()
    program = ["ranks/restarted_program.py", str(noted), "SIGKILL"]
    output = _Agents(hosts, 1, tmp_path, program, ["--max-restarts", "3"]).end_well()
    assert re.findall(r"start (\d): rank (\d) has (\w+)", output) == [("0", "0", "SIGKILL")]
    assert sorted(re.findall(r"start (\d): rank (\d) ends well", output)) == [("1", "0"), ("1", "1")]


@pytest.mark.parametrize(("host", "with_ranks"), [(0, True), (1, False)])
def test_an_agent_that_is_killed_ends_the_ranks_of_both_hosts(
    hosts: list[Host], tmp_path: Path, host: int, with_ranks: bool
) -> None:
    """The agent of host 0 has the store. Without it the other agent ends its ranks, at times before they print."""
    agents = _Agents(hosts, 2, tmp_path, ["hosts/looping_program.py"])
    ranks = agents.processes_of_ranks(4)
    there = hosts[host].processes().values()
    theirs = {rank for rank, process in ranks.items() if process in there}
    assert len(theirs) == 2
    began = time.monotonic()
    if with_ranks:
        hosts[host].lose()
    else:
        hosts[host].kill_agent()
    while running := [rank for rank, process in ranks.items() if _runs(process)]:
        assert time.monotonic() - began < BOUND_SECONDS, (running, agents.outputs)
        time.sleep(0.05)
    agents.processes[1 - host].join(BOUND_SECONDS)
    assert agents.processes[1 - host].exitcode not in (None, 0), agents.outputs
    for rank in set(ranks) - (theirs if with_ranks else set()):
        output = agents.outputs[host if rank in theirs else 1 - host]
        reasons = re.findall(rf"^rank {rank} stops because (.*)", output, re.M)
        if not reasons and host == 0:
            assert re.search(r"Closing process \d+ via signal", output), output
            continue
        assert len(reasons) == 1, output
        named = re.findall(r"launcher \(torchrun\) of rank (\d)|^rank (\d) died|launcher's store", reasons[0])
        assert named, output
        assert {int(number) for names in named for number in names if number} <= theirs, output


def test_a_lost_host_is_named_by_all_ranks_of_the_other(hosts: list[Host], tmp_path: Path) -> None:
    """Two ranks lose their connections at the same time, and agree on what both can no longer reach."""
    agents = _Agents(hosts, 2, tmp_path, ["hosts/looping_program.py", "2"])
    ranks = agents.processes_of_ranks(4)
    hosts[1].lose()
    agents.processes[0].join(BOUND_SECONDS)
    assert agents.processes[0].exitcode not in (None, 0), agents.outputs
    assert not any(map(_runs, ranks.values()))
    output = agents.outputs[0]
    reasons = re.findall(r"^rank (\d) stops because (.*)", output, re.M)
    lost = f"ranks 2 and 3 on host {hosts[1].name} are gone: they do not answer"
    assert sorted(reasons) == [("0", lost), ("1", lost)], output
    assert lost in output.partition("Root Cause")[2], output


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
