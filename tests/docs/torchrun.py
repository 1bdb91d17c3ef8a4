"""Scripts that run one after the other under one start of torchrun.

torchrun starts an interpreter a rank, which has a seed of its own from torch: a script without a seed has other weights
on each rank, as for its reader. The interpreter imports once what scripts import, and forks for each script: imports
take 4 s a rank.
"""

import faulthandler
import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.docs.logger_modules import logger_modules
from tests.docs.pages import ROOT
from tests.support.run_program import run_script
from tests.support.run_ranks import store_for_ranks

SCRIPT_SECONDS, START_SECONDS = 200.0, 120.0


class Torchrun:
    """A torchrun of ``ranks`` processes on this host, from ``__enter__`` to ``__exit__``."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._printed = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in __exit__
        self._connections: list[socket.socket] = []

    def __enter__(self) -> "Torchrun":
        with socket.create_server(("127.0.0.1", 0)) as server:
            module = ["-m", __name__, str(server.getsockname()[1])]
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self._ranks), *module]
            self._process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, stdout=self._printed, stderr=self._printed
            )
            server.settimeout(START_SECONDS)
            try:
                while len(self._connections) < self._ranks:
                    self._connections.append(server.accept()[0])
            except TimeoutError as error:
                self.__exit__(None, None, None)
                raise AssertionError(f"torchrun has not started {self._ranks} ranks") from error
        for connection in self._connections:
            connection.settimeout(SCRIPT_SECONDS + 10)
        self._files = [connection.makefile("rw") for connection in self._connections]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # The ranks end when their connections do, and torchrun after them.
        for connection in self._connections:
            connection.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._process.terminate()
        self._process.wait()
        self._printed.seek(0)
        sys.stderr.write(self._printed.read())
        self._printed.close()

    def run(self, name: str, script: Path, outputs: Path) -> list[int]:
        """Run ``script`` in its folder on all ranks; return exit codes. Ranks write ``outputs``/out0.txt, err0.txt."""
        # torchrun has a new store for each restart: worlds of transformers would find the keys of earlier ones.
        store = store_for_ranks(SCRIPT_SECONDS)
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        for file in self._files:
            print(json.dumps([address, name, str(script), str(outputs)]), file=file, flush=True)
        codes = dict(json.loads(file.readline()) for file in self._files)
        return [codes[rank] for rank in range(self._ranks)]


def run_page(rank: int, name: str, script: str, outputs: str) -> int:
    """Run the ``script`` of the page ``name`` as a program, in its folder; return its exit status."""
    os.chdir(Path(script).parent)
    for descriptor, of in enumerate(("out", "err"), 1):
        os.dup2(os.open(f"{outputs}/{of}{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    faulthandler.dump_traceback_later(SCRIPT_SECONDS, exit=True)
    if name == "logging":
        sys.modules |= logger_modules()
    return run_script(script, [])


def main(port: int) -> None:
    """Run the scripts that the caller names, each in a fork, until the caller closes the connection."""
    import tests.support.preloaded  # noqa: F401  # before the first fork

    rank = int(os.environ["RANK"])
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rw") as lines:
        for line in lines:
            address, *script = json.loads(line)
            child = os.fork()
            if child == 0:
                os.environ |= address
                os._exit(run_page(rank, *script))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(json.dumps([rank, code]), file=lines, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
