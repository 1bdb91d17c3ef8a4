"""Two agents of torchrun with a c10d rendezvous, on two network namespaces joined by a veth pair."""

import re
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from tests.hosts.trained_program import losses_of_one_process
from tests.support.two_hosts import Host, agent, reason_against, two_hosts

FOLDER = Path(__file__).parent
START_SECONDS = 200.0


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    if reason := reason_against():
        pytest.skip(f"no network namespaces here: {reason}")
    with two_hosts() as made:
        yield made


class _Agents:
    """An agent on each host, with what the host's processes wrote."""

    def __init__(self, hosts: list[Host], program: str, ranks: int, folder: Path) -> None:
        self._files = [folder / f"host{number}.txt" for number in range(2)]
        self.processes: list[Popen[str]] = []
        for number, (host, file) in enumerate(zip(hosts, self._files, strict=True)):
            with file.open("w") as output:
                self.processes.append(host.start(agent(number, ranks, [str(FOLDER / program)]), output))

    @property
    def outputs(self) -> list[str]:
        return [file.read_text(errors="replace") for file in self._files]


def test_two_hosts_train_with_the_losses_of_one_process_also_over_a_slow_link(
    hosts: list[Host], tmp_path: Path
) -> None:
    agents = _Agents(hosts, "trained_program.py", 1, tmp_path)
    for process in agents.processes:
        assert process.wait(START_SECONDS) == 0, "\n".join(agents.outputs)
    (losses,) = re.findall(r"losses (\[.*\])", "".join(agents.outputs))
    assert losses == str(losses_of_one_process())
