"""Checkpoints in a store of fsspec: whole at any moment, for any layout of ranks, and with nothing left on a host."""

import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from nxdpp import parallel_state
from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.remote_directory import RemoteDirectory
from nxdpp.doors.nxd.checkpoint import finalize_checkpoint, has_checkpoint, load_checkpoint, save_checkpoint
from tests.checkpoint.distributed.layouts import Layout, copy_through, tensors_in, train_and_save
from tests.checkpoint.distributed.small_training import Training, is_same
from tests.checkpoint.distributed.test_killed_saves import is_empty
from tests.support.run_ranks import fork_server, run_ranks
from tests.support.tensor_models import VOCABULARY, make

CHANGES = ("upload", "replace", "remove")


class FolderStore(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store that all processes of this host reach: ``s3://tmp/run`` is the folder ``/tmp/run``."""

    protocol = ("s3",)

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return f"/{path.removeprefix('s3://').strip('/')}"


fsspec.register_implementation("s3", FolderStore, clobber=True)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    # The server of ranks keeps its socket in the first one, and the path of a socket has 107 bytes at most.
    fork_server()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize(("tag", "kept"), [("step_3", 1), ("step_2", None)])
def test_a_checkpoint_loads_whenever_the_save_is_killed(
    tag: str, kept: int | None, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store" / "run"
    training = Training()
    assert not has_checkpoint(f"s3:/{path}")
    for step in range(3):
        training.step()
        training.save(f"s3:/{path}", f"step_{step}")
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
        training.save(f"s3:/{path}", tag, num_kept_ckpts=kept)
    copied()
    found = []
    for state in states:
        loaded = Training()
        assert loaded.load(f"s3:/{state}/")["tag"] in ("step_2", tag)
        found.append([is_same(loaded.state(), each) for each in (before, training.state())].index(True))
    assert len(found) == 5
    assert found == sorted(found)
    assert (found[0], found[1], found[-1]) == (0, 0, 1)
    # The next save removes what the killed one left, but for folders.
    for state in states:
        training.save(f"s3:/{state}", "step_4", num_kept_ckpts=1)
        assert {file.name for file in state.iterdir() if not is_empty(file)} == {"latest", "step_4"}
        assert len(list((state / "step_4").iterdir())) == 2
    # A directory of a file system is the same, and is locked.
    assert Training().load(path)["tag"] == tag
    assert not (path / ".lock").exists()
    training.save(f"file://{path}", "step_5")
    assert (path / ".lock").exists()
    assert has_checkpoint(f"file://{path}/")
    assert is_empty(temporary)


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"s3:/{tmp_path}/run"
    training = Training()
    training.save(address, "first")
    files = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patches:
        patches.setattr(FolderStore, "find", lambda *_, **__: {})
        with pytest.raises(RuntimeError, match="does not find it: all hosts must reach the same store"):
            training.save(address, "second")
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {path for path in files if path.is_file()}
    for name in ("put_file", "find", "pipe_file"):
        with monkeypatch.context() as patches:

            def fail(*_: Any, **__: Any) -> None:
                raise KeyError("of a library")

            patches.setattr(f"{__name__}.FolderStore.{name}", fail)
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
    with pytest.raises(ValueError, match=r"/s3/.*run/first/.*is damaged"):
        Training().load(address, "first")
    assert is_empty(temporary)


def test_objects_without_folders(temporary: Path) -> None:
    address, training = f"memory:/{temporary}/run", Training()
    states = []
    for step in range(4):
        training.step()
        states.append(training.state())
        training.save(address, f"step_{step}", num_kept_ckpts=2, async_save=step % 2 == 1)
    finalize_checkpoint()
    for tag, state in ((None, states[3]), ("step_2", states[2])):
        loaded = Training()
        loaded.load(address, tag)
        assert is_same(loaded.state(), state)
    with pytest.raises(FileNotFoundError, match=r"has step_2, step_3"):
        Training().load(address, "step_1")
    # A damaged checkpoint is not counted.
    store = fsspec.filesystem("memory")
    (file,) = store.glob(f"{temporary}/run/step_3/*.safetensors")
    store.pipe_file(file, store.cat_file(file)[:-1] + b"\1")
    assert training.load(address)["tag"] == "step_2"
    training.save(address, "step_4", num_kept_ckpts=2)
    for tag in ("step_2", "step_4"):
        assert Training().load(address, tag)["tag"] == tag
    assert is_empty(temporary)


def test_a_document_that_may_be_stored_keeps_its_files(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, training = f"memory:/{temporary}/lost", Training()
    training.save(address, "only")
    replace = RemoteDirectory.replace

    def fail(*_: Any, **__: Any) -> None:
        raise TimeoutError("no answer")

    def send_and_fail(self: RemoteDirectory, path: Path) -> None:
        replace(self, path)
        if path.name == directory.DOCUMENT:
            raise OSError(5, "no answer")

    with monkeypatch.context() as patches:
        patches.setattr("fsspec.implementations.memory.MemoryFileSystem.pipe_file", fail)
        for tag in ("only", "other"):
            with pytest.raises(OSError, match=r"no answer. Earlier checkpoints are there"):
                training.save(address, tag)
    assert Training().load(address)["tag"] == "only"
    assert len(fsspec.filesystem("memory").find(f"{temporary}/lost")) == 3
    monkeypatch.setattr(RemoteDirectory, "replace", send_and_fail)
    training.step()
    training.save(address, "only", num_kept_ckpts=1)
    assert len(fsspec.filesystem("memory").find(f"{temporary}/lost")) == 3
    with monkeypatch.context() as patches:
        patches.setattr(RemoteDirectory, "has", fail)
        with pytest.raises(OSError, match=r"no answer. Whether the store has it is not known: its files stay"):
            training.save(address, "only", num_kept_ckpts=1)
    loaded = Training()
    loaded.load(address)
    assert is_same(loaded.state(), training.state())
    # The local folder has no room for ``latest``.
    monkeypatch.setattr(directory, "write_latest", fail)
    with pytest.raises(OSError, match="is saved: load_checkpoint with tag='next' loads it"):
        training.save(address, "next", num_kept_ckpts=1)
    assert Training().load(address)["tag"] == "only"
    assert Training().load(address, "next")["tag"] == "next"


def test_an_address_of_no_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    model = torch.nn.Linear(2, 2)
    addresses: list[tuple[str | Path, str]] = [
        ("hdfs://bucket/run", "is in a store that may show a file before it is whole: give an address of one of s3, "),
        ("gs://bucket/run", "needs a package of fsspec, which this host does not have.*on all hosts, such as s3fs"),
        (Path("s3://bucket/run"), "is not the address of a store: give it as text, 's3://bucket/run'"),
        ("s3://key:se/cret@bucket/run", "path has a user and a password, which messages would show"),
    ]
    for address, sentence in addresses:
        calls: list[Callable[[], object]] = [
            partial(save_checkpoint, address, "tag", model),
            partial(load_checkpoint, address, "tag", model),
            partial(has_checkpoint, address),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=sentence) as caught:
                call()
            assert "cret" not in str(caught.value)


PIPELINED, SHARDED = Layout(2), Layout(1, 1, True)


def _through_layouts(rank: int, path: Path, temporary: Path) -> None:
    tempfile.tempdir = str(temporary)
    address: Any = f"s3:/{path}"
    ids = torch.randint(0, VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(7))
    batches = [{"input_ids": ids, "labels": ids}] * 2
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    train_and_save(lambda: make("llama"), batches, PIPELINED, address)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    copy_through(lambda: make("llama"), SHARDED, address, str(PIPELINED))
    with pytest.raises(ValueError, match="path='s3://other' on rank 1"):
        save_checkpoint(address if rank == 0 else "s3://other", "third")
    files = sorted(path.rglob("*.*"))
    parallel_state.get_exchange().gather(0)

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("of a library")

    with pytest.MonkeyPatch.context() as patches:
        if rank == 1:
            patches.setattr(FolderStore, "put_file", fail)
        sentence = r"rank 1 cannot write s3://.*'of a library'. Earlier checkpoints are there"
        with pytest.raises(OSError, match=sentence):
            save_checkpoint(address, str(SHARDED), make("llama"))
        parallel_state.get_exchange().gather(0)
        assert sorted(path.rglob("*.*")) == files
        save_checkpoint(address, str(SHARDED), make("llama"), async_save=True)
        with pytest.raises(OSError, match=sentence):
            finalize_checkpoint()
        assert sorted(path.rglob("*.*")) == files


def test_another_layout_loads_to_the_bit(tmp_path: Path, temporary: Path) -> None:
    path = tmp_path / "run"
    run_ranks(2, _through_layouts, path, temporary)
    (_, first), (_, second) = tensors_in(path / str(PIPELINED)), tensors_in(path / str(SHARDED))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert len(list((path / str(PIPELINED)).glob("*.safetensors"))) == 2
    assert not list(temporary.glob("*/file"))
