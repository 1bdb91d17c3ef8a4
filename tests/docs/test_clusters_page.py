"""docs/guide/clusters.md: Ray Train on a cluster of this machine, and the command of the pods that its manifest starts.

Both end where an undisturbed process ends, after a fault too. No cluster of Kubernetes is needed: a pod is an agent of
torchrun with the variables of its operator.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp.ranks.faults.ending_process import wait_until
from tests.docs.pages import GUIDE, ROOT, blocks, fragments, script
from tests.docs.test_several_hosts_page import TRAIN

PAGE = GUIDE / "clusters.md"
SECONDS = 110.0
RAY_SECONDS = 500.0
"""A cluster starts ten processes: 60 s on two quiet cores, and four times as long on busy ones."""

# What rank 1 does once, in a layer, in its fourth step. Each rank notes its losses. Ray's workers have other folders.
DISTURB = """import os, pathlib, signal, time
import torch

HERE = pathlib.Path(__file__).parent
ONCE = HERE / "disturbed"

def disturb(model, what):
    if what in DO and torch.distributed.get_rank() == 1 and not ONCE.exists():
        calls = 0
        def layer(module, arguments):
            nonlocal calls
            calls += 1
            if calls == 7:
                ONCE.touch()
                DO[what]()
        modules = dict(model.local_named_modules())
        next(each for name, each in modules.items() if name.endswith("layers.1.mlp")).register_forward_pre_hook(layer)

def fail():
    raise ValueError("row 17 is damaged")

def end_pod():
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

DO = {
    "fails": fail,
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(1000),
    "is lost": end_pod,
}

def note(step, loss):
    with open(HERE / f"rank{torch.distributed.get_rank()}.txt", "a") as file:
        file.write(f"{step} {loss!r}\\n")
"""


def _write(folder: Path, fault: str) -> None:
    """Write ``train.py`` of the page, with a fault of rank 1."""
    text = script(PAGE)
    for place, more in (
        ("import nxdpp\n", "from disturb import disturb, note\n"),
        ("    optimizer = ", f"    disturb(model, {fault!r})\n"),
        ("        report(", "        note(step, loss)\n"),
    ):
        assert text.count(place) == 1
        text = text.replace(place, more + place)
    (folder / "train.py").write_text(text.replace("_size=2)", "_size=2, hang_timeout=3)"))
    (folder / "disturb.py").write_text(DISTURB)


def _losses_of_one_process() -> list[float]:
    torch.manual_seed(0)
    (written,) = re.findall(r"LlamaConfig\((.*)\)", script(PAGE))
    sizes: dict[str, Any] = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", written)}
    model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(6):
        ids = torch.arange(step, step + 64).view(4, 16)
        parts = [model(input_ids=rows, labels=rows).loss / 2 for rows in ids.chunk(2)]
        for part in parts:
            part.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts))
    return losses


def _check_losses(folder: Path, steps: list[int]) -> None:
    """Compare the noted losses, of ``steps`` in their order, with those of one process."""
    expected = _losses_of_one_process()
    for rank in (0, 1):
        rows = [line.split() for line in (folder / f"rank{rank}.txt").read_text().splitlines()]
        assert [int(step) for step, _ in rows] == steps
        assert [float(loss) for _, loss in rows] == pytest.approx([expected[step] for step in steps], rel=1e-6)


FAULTS = {
    "fails": "rank 0 stops because rank 1 failed with ValueError: see the traceback of rank 1",
    "is killed": "rank 0 stops because rank 1 died without an error: killed by a signal",
    "hangs": "rank 0 stops because rank 1 hangs: run_train step 4, stage 1, forward of microbatch 0",
}
RESUMED = [0, 1, 2, 2, 3, 4, 5]
"""Steps of a training that resumes from the checkpoint of two steps."""


@pytest.mark.sweep
@pytest.mark.timeout(RAY_SECONDS + 60)
@pytest.mark.parametrize("fault", ["nothing", *FAULTS])
def test_ray_train_resumes_after_a_fault(fault: str, tmp_path: Path) -> None:
    """``pip install 'ray[train]'``, then ``python -m pytest -m sweep`` with this file."""
    pytest.importorskip("ray.train.torch", exc_type=ImportError)
    _write(tmp_path, fault)
    (job,) = fragments(PAGE)
    start = "import ray\nray.init(num_cpus=3, include_dashboard=False)\n"
    (tmp_path / "job.py").write_text(start + job.text.replace("/shared", str(tmp_path)))
    ended = subprocess.run(
        [sys.executable, "job.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=RAY_SECONDS,
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    _check_losses(tmp_path, RESUMED if fault in FAULTS else [*range(6)])
    assert FAULTS.get(fault, "") in output
    # A training without a fault ends without a line of a fault.
    assert ("stops because" in output) == (fault in FAULTS), output


def _manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    (text,) = [block.text for block in blocks(PAGE) if block.language == "yaml"]
    runtime, job = yaml.safe_load_all(text)
    return runtime, job


def test_the_job_and_its_runtime_fit() -> None:
    """By the names that Kubeflow Trainer looks for: the job's step, its container and its volumes."""
    runtime, job = _manifest()
    assert runtime["apiVersion"] == job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert replicated["name"] == container["name"] == "node"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert list(mounts) == [volume["name"] for volume in pod["volumes"]]
    assert mounts["shared"] == container["workingDir"]


class _Pods:
    """Agents of torchrun that the manifest's command starts, with the variables of TrainJob, and of PyTorchJob too."""

    def __init__(self, folder: Path, processes: int) -> None:
        with socket.socket() as chosen:
            chosen.bind(("127.0.0.1", 0))
            port = str(chosen.getsockname()[1])
        trainer = _manifest()[1]["spec"]["trainer"]
        nodes = trainer["numNodes"]
        self.agents = []
        self._files = [folder / f"pod{node}.txt" for node in range(nodes)]
        for node, file in enumerate(self._files):
            variables = {"NNODES": nodes, "NPROC_PER_NODE": processes, "NODE_RANK": node}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {f"PET_{name}": str(value) for name, value in variables.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment |= {"RANK": str(node), "WORLD_SIZE": str(nodes * processes)}
            environment |= {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
                "LAUNCHER": str(ROOT / "nxdpp/ranks"),
            }
            with file.open("w") as written:
                command = trainer["command"]
                agent = subprocess.Popen(
                    command, cwd=folder, env=os.environ | environment, stdout=written, stderr=written
                )
            self.agents.append(agent)

    @property
    def output(self) -> str:
        return "".join(file.read_text() for file in self._files)

    def __enter__(self) -> "_Pods":
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.terminate()
        for agent in self.agents:
            agent.wait(60)

    def end_well(self) -> None:
        for agent in self.agents:
            assert agent.wait(SECONDS) == 0, self.output


def test_the_command_of_the_pods_starts_all_processes(tmp_path: Path) -> None:
    processes = _manifest()[1]["spec"]["trainer"]["numProcPerNode"]
    (tmp_path / "train.py").write_text(TRAIN)
    with _Pods(tmp_path, processes) as pods:
        pods.end_well()
    found = re.findall(r"torchrun (\d+) of 16, (\d+) of 8", pods.output)
    expected = [(rank, rank % 8) for rank in range(16)]
    assert sorted((int(rank), int(local_rank)) for rank, local_rank in found) == expected
    logs = (tmp_path / "logs").glob("*/attempt_0/*/stdout.log")
    assert sum(log.read_text().startswith("torchrun") for log in logs) == 16


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS)
def test_pods_go_on_after_a_fault_of_a_process(fault: str, tmp_path: Path) -> None:
    _write(tmp_path, fault)
    with _Pods(tmp_path, 1) as pods:
        pods.end_well()
    assert FAULTS[fault] in pods.output
    _check_losses(tmp_path, RESUMED)


@pytest.mark.sweep
def test_new_pods_resume_after_the_loss_of_one(tmp_path: Path) -> None:
    """Kubernetes ends the pods that are left, and makes all again."""
    _write(tmp_path, "is lost")
    with _Pods(tmp_path, 1) as pods:
        first, lost = pods.agents
        assert lost.wait(SECONDS) < 0
        assert wait_until(lambda: FAULTS["is killed"] in pods.output, 30), pods.output
        first.terminate()
        assert first.wait(60) != 0
    with _Pods(tmp_path, 1) as pods:
        pods.end_well()
    _check_losses(tmp_path, RESUMED)
