"""docs/guide/clusters.md: the command of the pods that its manifest starts, without a cluster of Kubernetes.

A pod is an agent of torchrun with the variables of its operator.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.docs.pages import GUIDE, ROOT, blocks
from tests.docs.test_several_hosts_page import TRAIN

PAGE = GUIDE / "clusters.md"
SECONDS = 110.0


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


def test_the_command_of_the_pods_starts_all_processes(tmp_path: Path) -> None:
    """With the variables of TrainJob, and those of PyTorchJob beside them."""
    trainer = _manifest()[1]["spec"]["trainer"]
    nodes, processes = trainer["numNodes"], trainer["numProcPerNode"]
    (tmp_path / "train.py").write_text(TRAIN)
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(chosen.getsockname()[1])}
    agents, files = [], [tmp_path / f"pod{node}.txt" for node in range(nodes)]
    for node, file in enumerate(files):
        variables = {"NNODES": nodes, "NPROC_PER_NODE": processes, "NODE_RANK": node, **master}
        environment = {f"PET_{name}": str(value) for name, value in variables.items()} | master
        environment |= {
            "RANK": str(node),
            "WORLD_SIZE": str(nodes * processes),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "LAUNCHER": str(ROOT / "nxdpp/ranks"),
        }
        with file.open("w") as written:
            agent = subprocess.Popen(
                trainer["command"], cwd=tmp_path, env=os.environ | environment, stdout=written, stderr=written
            )
        agents.append(agent)
    try:
        assert [agent.wait(SECONDS) for agent in agents] == [0] * nodes, [file.read_text() for file in files]
    finally:
        for agent in agents:
            agent.terminate()
    found = re.findall(r"torchrun (\d+) of 16, (\d+) of 8", "".join(file.read_text() for file in files))
    assert sorted((int(rank), int(local_rank)) for rank, local_rank in found) == [
        (rank, rank % 8) for rank in range(16)
    ]
    logs = (tmp_path / "logs").glob("*/attempt_0/*/stdout.log")
    assert sum(log.read_text().startswith("torchrun") for log in logs) == 16
