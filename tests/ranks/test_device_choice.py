"""Device and backend follow the local rank and the visible devices; unusable CUDA is an error with a remedy."""

import logging
import re
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, distributed_c10d  # type: ignore[attr-defined]

from nxdpp.devices import accelerator, cuda
from nxdpp.ranks import current_state, launch, parallel_state
from nxdpp.ranks.device_choice import choose, device_of_world, start_device, verify_own_devices, wanted_device
from nxdpp.ranks.launcher import Launcher
from nxdpp.ranks.transfer_groups import unbound
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_xla import FakeXla
from tests.support.run_ranks import run_ranks

CPU = torch.device("cpu")


def _ranks(name: str, ranks: int, local_size: int | None = None) -> list[Launcher]:
    return [Launcher(name, rank, ranks, rank, local_size) for rank in range(ranks)]


def test_each_local_rank_has_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(visible=8).install(monkeypatch)
    for launcher in _ranks("torchrun", 8, 8) + _ranks("srun", 8, 8) + _ranks("mpirun", 8):
        assert choose(launcher, None) == choose(launcher, "nccl") == torch.device("cuda", launcher.rank)
        assert choose(launcher, "gloo") == CPU


def test_one_visible_device_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(visible=1).install(monkeypatch)
    for launcher in (Launcher("srun", 3, 4, 3, 4), Launcher("mpirun", 3, 4, 3), Launcher("torchrun", 5, 8)):
        assert choose(launcher, None) == torch.device("cuda", 0)


def test_hidden_devices_leave_the_cpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    FakeCuda(visible=0).install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert choose(Launcher("torchrun", 0, 2, 0, 2), None) == CPU
    assert not caplog.messages
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES hides all devices\. Use backend='gloo'"):
        choose(Launcher("torchrun", 0, 2, 0, 2), "nccl")


def test_cuda_without_a_driver_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeCuda(visible=0).install(monkeypatch)
    monkeypatch.setattr(cuda, "_DRIVER_FILES", (str(tmp_path),))
    launcher = Launcher("torchrun", 0, 2, 0, 2)
    expected = (
        f"torch is built for CUDA 13.0, {tmp_path} exists, and no device can be used: Found no NVIDIA driver on your "
        "system. Please check that you have one. Repair that"
    )
    for backend in (None, "nccl"):
        with pytest.raises(RuntimeError, match=re.escape(expected)):
            choose(launcher, backend)
    # The remedies: gloo, and a driver that lists the devices.
    assert choose(launcher, "gloo") == CPU
    FakeCuda(visible=2).install(monkeypatch)
    assert choose(launcher, None) == torch.device("cuda", 0)


def test_fewer_devices_than_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher("torchrun", 0, 8, 0, 8)
    FakeCuda(visible=2).install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(
        RuntimeError, match=r"2 CUDA devices are visible .*='4,5'.* for 8 local ranks, started"
    ) as raised:
        choose(launcher, None)
    assert "--nproc-per-node 2" in str(raised.value)
    # The remedies: fewer processes, one device a task, gloo.
    assert choose(Launcher("torchrun", 1, 2, 1, 2), None) == torch.device("cuda", 1)
    assert choose(launcher, "gloo") == CPU
    FakeCuda(visible=1).install(monkeypatch)
    assert choose(launcher, None) == torch.device("cuda", 0)


def test_the_backend_is_checked_before_the_start() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="backend='mpi' must be 'gloo', for the CPU, or 'nccl'"):
        parallel_state.initialize_model_parallel(backend="mpi")
    with pytest.raises(ValueError, match="backend='nccl' needs a CUDA device"):
        parallel_state.initialize_model_parallel(backend="nccl")
    assert not dist.is_initialized()
    # The remedy of both.
    parallel_state.initialize_model_parallel(backend="gloo")
    try:
        assert parallel_state.local_device() == CPU
        parallel_state.initialize_model_parallel(backend="gloo")
        with pytest.raises(RuntimeError, match="already initialized on gloo, which differs from backend='nccl'"):
            parallel_state.initialize_model_parallel(backend="nccl")
    finally:
        parallel_state.destroy_model_parallel()


def _verified(identities: list[str]) -> list[str]:
    """The error of each rank, or nothing."""
    store = HashStore()
    errors = [""] * len(identities)

    def verify(rank: int) -> None:
        try:
            verify_own_devices(store, rank, len(identities), identities[rank])
        except RuntimeError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=verify, args=(rank,)) for rank in range(len(identities))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return errors


def test_ranks_that_share_a_device_are_told_on_all_ranks() -> None:
    assert _verified(["uuid-0", "uuid-1", "uuid-2"]) == ["", "", ""]
    errors = _verified(["uuid-0", "uuid-1", "uuid-1"])
    assert len(set(errors)) == 1
    assert re.match("ranks (1 and 2|2 and 1) both see uuid-1 of host .* as their first device, and each", errors[0])


def test_a_named_device(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher("torchrun", 1, 2, 1, 2)
    FakeCuda(visible=2).install(monkeypatch)
    FakeXla().install(monkeypatch, "CPU")
    assert choose(launcher, None, "cpu") == CPU
    assert choose(launcher, None, "cuda") == torch.device("cuda", 1)
    assert choose(launcher, None, "xla") == torch.device("xla", 0)
    # XLA is never a default.
    assert choose(launcher, "gloo") == CPU
    FakeCuda(visible=0).install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match=r"device='cuda' needs a CUDA device, and CUDA_.* Use device='cpu'\."):
        choose(launcher, None, "cuda")


def _other_device_on_rank_1(rank: int) -> str:
    FakeXla().install(pytest.MonkeyPatch(), "NEURON")
    try:
        parallel_state.initialize_model_parallel(device="xla" if rank == 1 else "cpu")
    except RuntimeError as error:
        assert not dist.is_initialized()
        return str(error)
    return "not refused"


def test_ranks_with_different_devices_are_refused_on_all_ranks() -> None:
    errors = run_ranks(3, _other_device_on_rank_1)
    assert len(set(errors)) == 1
    expected = "the ranks have devices of different kinds: cpu on ranks 0 and 2, xla (NEURON) on rank 1. Give all"
    assert errors[0].startswith(expected)


@pytest.mark.parametrize(
    ("hang", "compiling", "limit"),
    [(300, 3600, timedelta(minutes=65)), (0, 3600, None)],
)
def test_an_operation_may_take_longer_than_our_own_limits(
    monkeypatch: pytest.MonkeyPatch, hang: float, compiling: float, limit: timedelta | None
) -> None:
    """Torch would end a rank that waits for a compilation after 10 minutes on NCCL."""
    FakeCuda(visible=2).install(monkeypatch)
    given: dict[str, Any] = {}

    def init(backend: str, **arguments: Any) -> None:
        given.update(arguments, backend=backend)
        raise NotImplementedError

    monkeypatch.setattr(dist, "init_process_group", init)
    with pytest.raises(NotImplementedError):
        parallel_state.initialize_model_parallel(hang_timeout=hang, compile_timeout=compiling)
    assert given["backend"] == "nccl"
    assert given["timeout"] == (timedelta(days=20) if limit is None else limit)


def _limits(rank: int) -> list[timedelta]:
    """Limits that torch is given for the groups of a rank."""
    found: list[timedelta] = []
    new_group = distributed_c10d.new_group

    def noted(*arguments: Any, **others: Any) -> Any:
        found.append(others["timeout"])
        return new_group(*arguments, **others)

    distributed_c10d.new_group = noted
    parallel_state.initialize_model_parallel(2, 2, hang_timeout=100, compile_timeout=200)
    parallel_state.get_exchange()
    state = current_state.with_groups()
    assert state.own_group is not None
    assert state.model_group is not None
    parallel_state.destroy_model_parallel()
    return found


def test_all_groups_have_the_limit() -> None:
    for found in run_ranks(4, _limits):
        assert found
        assert set(found) == {timedelta(seconds=500)}


def test_a_machine_without_a_gpu_is_told_of_once_a_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FakeCuda(visible=0).install(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert [choose(launcher, None) for launcher in _ranks("torchrun", 2, 2)] == [CPU, CPU]
    assert caplog.messages == [
        "torch is built for CUDA 13.0, and this machine shows no GPU: the ranks train on the CPU, over gloo"
    ]


def test_a_running_world_on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(visible=4, current=0).install(monkeypatch)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
        assert device_of_world(Launcher("torchrun", 0, 1, 1, 4), None) == torch.device("cuda", 1)
        assert fake.current == 1
    finally:
        dist.destroy_process_group()


def test_a_world_of_two_backends_has_the_named_device(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher("torchrun", 1, 2, 1, 2)
    FakeCuda(visible=2).install(monkeypatch)
    dist.init_process_group(store=HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
        assert device_of_world(launcher, None, "cpu") == CPU
        assert device_of_world(launcher, None, "cuda") == torch.device("cuda", 1)
        with pytest.raises(
            ValueError, match=r"needs a world of gloo alone, .* start it with init_process_group\('gloo'"
        ):
            device_of_world(launcher, None, "xla")
        # CUDA that was asked for is not replaced by the CPU.
        FakeCuda(visible=0).install(monkeypatch)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert device_of_world(launcher, None) == CPU
        with pytest.raises(ValueError, match="device='cuda' needs a CUDA device"):
            device_of_world(launcher, None, "cuda")
        with pytest.raises(ValueError, match="backend='nccl' needs a CUDA device"):
            device_of_world(launcher, "nccl")
    finally:
        dist.destroy_process_group()


@pytest.fixture
def xpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four devices of the type xpu, and without CUDA."""
    FakeCuda(built=False).install(monkeypatch)
    monkeypatch.setattr(accelerator, "present", lambda: "xpu")
    monkeypatch.setattr(accelerator, "count", lambda kind: 4 if kind == "xpu" else 0)


@pytest.mark.usefixtures("xpus")
def test_an_accelerator_of_another_type() -> None:
    for launcher in _ranks("torchrun", 4, 4):
        own = torch.device("xpu", launcher.rank)
        assert choose(launcher, None) == choose(launcher, "xccl") == choose(launcher, None, "xpu") == own
        assert choose(launcher, "gloo") == choose(launcher, None, "cpu") == CPU
    with pytest.raises(
        RuntimeError, match="4 xpu devices are visible for 8 local ranks, started by torchrun: start at"
    ):
        choose(Launcher("torchrun", 4, 8, 4, 8), None)
    with pytest.raises(ValueError, match=r"device=.cuda. needs a CUDA device, and torch is built without CUDA\. Use"):
        choose(Launcher("torchrun", 0, 1, 0, 1), None, "cuda")


@pytest.mark.usefixtures("xpus")
def test_an_absent_type_names_the_remedies() -> None:
    launcher = Launcher("torchrun", 0, 2, 0, 2)
    with pytest.raises(ValueError, match=r"^device='hpu' needs a device of the type 'hpu', and torch finds none"):
        choose(launcher, None, "hpu")
    with pytest.raises(ValueError, match=r"^device='meta' must be 'cpu', 'cuda', 'xpu' or another type"):
        choose(launcher, None, "meta")


def test_a_type_without_a_backend_is_taken_by_name_and_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FakeCuda(built=False).install(monkeypatch)
    monkeypatch.setattr(accelerator, "present", lambda: "mps")
    monkeypatch.setattr(accelerator, "count", lambda kind: 1 if kind == "mps" else 0)
    with caplog.at_level(logging.WARNING):
        assert [choose(launcher, None) for launcher in _ranks("torchrun", 2, 2)] == [CPU, CPU]
        assert not caplog.messages
        found = [choose(launcher, None, "mps") for launcher in _ranks("torchrun", 2, 2)]
    assert found == [torch.device("mps", 0)] * 2
    (message,) = caplog.messages
    assert message.startswith("device='mps': torch.distributed has no backend for this type: its tensors go over gloo")


def test_no_group_splits_the_communicator_of_a_bound_world() -> None:
    """A split is collective over the world, and groups of some ranks are made by those alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert world is not None
        world.bound_device_id = torch.device("cuda", 0)
        with unbound():
            assert world.bound_device_id is None
        assert world.bound_device_id == torch.device("cuda", 0)
    finally:
        dist.destroy_process_group()


def test_an_unknown_local_rank_among_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(visible=4).install(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(RuntimeError, match="which of them is that of rank 1: export LOCAL_RANK"):
        launch.choose_device(None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launch.choose_device(None) == torch.device("cuda", 1)


def test_devices_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(visible=2, nccl=False).install(monkeypatch)
    launcher = Launcher("torchrun", 0, 2, 0, 2)
    with pytest.raises(RuntimeError, match="2 CUDA devices are visible, and this torch is built without NCCL"):
        choose(launcher, None)
    assert choose(launcher, "gloo") == CPU


def test_a_device_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(visible=2, broken=[0]).install(monkeypatch)
    with pytest.raises(RuntimeError, match=r"cuda:0 of host .* is visible and cannot be used: CUDA error: all CUDA-"):
        start_device(torch.device("cuda", 0))
    assert start_device(torch.device("cuda", 1)) == "H200 uuid-1"


def test_a_device_in_a_world_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher("python", 0, 1, 0, 1)
    FakeXla().install(monkeypatch, "CPU")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        assert device_of_world(launcher, None, "xla") == torch.device("xla", 0)
        assert device_of_world(launcher, None, "cpu") == device_of_world(launcher, None) == CPU
        with pytest.raises(
            ValueError, match=r"device='cuda', but torch\.distributed already .*: leave device out, or st"
        ):
            parallel_state.initialize_model_parallel(device="cuda")
        monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
        for device in ("cpu", "xla"):
            with pytest.raises(ValueError, match=f"device='{device}', but .* runs on cuda:nccl: leave device out, or"):
                parallel_state.initialize_model_parallel(device=device)
        assert not parallel_state.model_parallel_is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_second_call_has_the_same_device() -> None:
    parallel_state.initialize_model_parallel(device="cpu")
    try:
        parallel_state.initialize_model_parallel(device="cpu", backend="gloo")
        parallel_state.initialize_model_parallel()
        for device in ("xla", "cuda"):
            with pytest.raises(
                RuntimeError, match=f"on device='cpu', which differs from device='{device}': call destr"
            ):
                parallel_state.initialize_model_parallel(device=device)
        with pytest.raises(ValueError, match="device='tpu' must be"):
            parallel_state.initialize_model_parallel(device="tpu")
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    ("backend", "device", "needed"), [("nccl", "xla", "gloo"), ("nccl", "cpu", "gloo"), ("gloo", "cuda", "nccl")]
)
def test_a_backend_that_does_not_serve_the_device(backend: str, device: str, needed: str) -> None:
    expected = (
        f"backend='{backend}' does not serve device='{device}', which communicates over {needed}: leave backend out, "
        f"or give backend='{needed}'"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        wanted_device(backend, device)
    assert wanted_device(None, device) == wanted_device(needed, device) == device
