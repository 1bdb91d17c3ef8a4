"""Checkpoints in a store of fsspec: whole at any moment, for any layout of ranks, and with nothing left on a host."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from nxdpp import parallel_state
from nxdpp.checkpoint.distributed.remote_directory import RemoteDirectory
from nxdpp.doors.nxd.checkpoint import finalize_checkpoint, has_checkpoint, load_checkpoint, save_checkpoint
from tests.checkpoint.distributed.layouts import Layout, copy_through, tensors_in, train_and_save
from tests.checkpoint.distributed.small_training import Training, is_same
from tests.checkpoint.distributed.test_killed_saves import is_empty
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import VOCABULARY, make

CHANGES = ("upload", "replace", "remove")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize(("tag", "kept"), [("step_3", None), ("step_3", 1), ("step_2", 2)])
def test_a_checkpoint_loads_whenever_the_save_is_killed(
    tag: str, kept: int | None, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store" / "run"
    training = Training()
    assert not has_checkpoint(f"file://{path}")
    for step in range(3):
        training.step()
        training.save(f"file://{path}", f"step_{step}")
    before = training.state()
    training.step()
    states: list[Path] = []

    def copied() -> None:
        states.append(shutil.copytree(path, tmp_path / f"state_{len(states)}"))

    def before_each(name: str) -> Any:
        change = getattr(RemoteDirectory, name)

        def changed(*arguments: Any) -> None:
            copied()
            change(*arguments)

        return changed

    with monkeypatch.context() as patches:
        for name in CHANGES:
            patches.setattr(RemoteDirectory, name, before_each(name))
        training.save(f"file://{path}", tag, num_kept_ckpts=kept)
    copied()
    found = []
    for state in states:
        loaded = Training()
        assert loaded.load(f"file://{state}/")["tag"] in ("step_2", tag)
        found.append([is_same(loaded.state(), each) for each in (before, training.state())].index(True))
    assert len(found) == 5
    assert found == sorted(found)
    assert (found[0], found[1], found[-1]) == (0, 0, 1)
    # The next save removes what the killed one left, but for folders.
    for state in states:
        training.save(f"file://{state}", "step_4", num_kept_ckpts=1)
        assert {file.name for file in state.iterdir() if not is_empty(file)} == {"latest", "step_4"}
        assert len(list((state / "step_4").iterdir())) == 2
    # A directory of a file system is the same.
    assert Training().load(path)["tag"] == tag
    assert is_empty(temporary)


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"file://{tmp_path}/run"
    training = Training()
    training.save(address, "first")
    files = sorted(tmp_path.rglob("*"))
    for name in ("put_file", "find", "pipe_file"):
        with monkeypatch.context() as patches:

            def fail(*_: Any, **__: Any) -> None:
                raise KeyError("of a library")

            patches.setattr(f"fsspec.implementations.local.LocalFileSystem.{name}", fail)
            with pytest.raises(OSError, match=rf"rank 0 cannot \w+ {address}.*KeyError: 'of a library'. Earlier"):
                training.save(address, "second")
        assert {path for path in tmp_path.rglob("*") if path.is_file()} == {path for path in files if path.is_file()}
    training.save(address, "second", async_save=True, num_kept_ckpts=2)
    finalize_checkpoint()
    assert Training().load(address)["tag"] == "second"
    (tmp_path / "run/second/checkpoint.json").write_text("damaged")
    assert Training().load(address)["tag"] == "first"
    for file in (tmp_path / "run/first").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(ValueError, match=r"/file/.*run/first/.*is damaged"):
        Training().load(address, "first")
    with pytest.raises(FileNotFoundError, match="run/third has no whole checkpoint"):
        Training().load(address, "third")
    with pytest.raises(FileNotFoundError, match=r"has_checkpoint\('file://.*empty'\) tells"):
        Training().load(f"file://{tmp_path}/empty")
    assert is_empty(temporary)


def test_objects_without_folders(temporary: Path) -> None:
    address, training = f"memory://{temporary}/run", Training()
    states = []
    for step in range(4):
        training.step()
        states.append(training.state())
        training.save(address, f"step_{step}", num_kept_ckpts=2, async_save=step % 2 == 1)
        save_checkpoint(f"{address}2", "other")
    finalize_checkpoint()
    for tag, state in ((None, states[3]), ("step_2", states[2])):
        loaded = Training()
        loaded.load(address, tag)
        assert is_same(loaded.state(), state)
    with pytest.raises(FileNotFoundError, match=r"has step_2, step_3"):
        Training().load(address, "step_1")
    assert is_empty(temporary)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        (
            "nowhere://bucket/run",
            "needs a package of fsspec, which this host does not have: Protocol not known: nowhere",
        ),
        ("oss://bucket/run", "this host does not have: Install ossfs.*on all hosts, such as s3fs for s3://, or give a"),
        ("file:///run/../other", "has a step upwards"),
    ],
)
def test_a_store_without_its_package_is_refused(address: str, sentence: str) -> None:
    model = torch.nn.Linear(2, 2)
    for call in (lambda: save_checkpoint(address, "tag", model), lambda: load_checkpoint(address, "tag", model)):
        with pytest.raises(ValueError, match=sentence):
            call()
    with pytest.raises(ValueError, match=sentence):
        has_checkpoint(address)


PIPELINED, SHARDED = Layout(2), Layout(1, 1, True)


def _through_layouts(rank: int, path: Path, temporary: Path) -> None:
    tempfile.tempdir = str(temporary)
    address: Any = f"file://{path}"
    ids = torch.randint(0, VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(7))
    batches = [{"input_ids": ids, "labels": ids}] * 2
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    train_and_save(lambda: make("llama"), batches, PIPELINED, address)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    copy_through(lambda: make("llama"), SHARDED, address, str(PIPELINED))
    with pytest.raises(ValueError, match="path='file:///other' on rank 1"):
        save_checkpoint(f"file://{path}" if rank == 0 else "file:///other", "third")


def test_another_layout_loads_to_the_bit(tmp_path: Path, temporary: Path) -> None:
    path = tmp_path / "run"
    run_ranks(2, _through_layouts, path, temporary)
    (_, first), (_, second) = tensors_in(path / str(PIPELINED)), tensors_in(path / str(SHARDED))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert len(list((path / str(PIPELINED)).glob("*.safetensors"))) == 2
    assert not list(temporary.glob("*/file"))
