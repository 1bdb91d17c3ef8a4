"""A load that fails midway: all ranks know, and steps and saves are refused until a load succeeds."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from nxdpp import gather_state_dict, parallel_state, save_pretrained
from nxdpp.checkpoint.distributed import load
from nxdpp.checkpoint.distributed.document import parsed_document, read_document
from nxdpp.checkpoint.distributed.reads import VerifiedReads
from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint
from tests.checkpoint.distributed import small_training
from tests.checkpoint.distributed.layouts import Layout, Training
from tests.checkpoint.distributed.small_training import is_same
from tests.checkpoint.distributed.test_damage import shard
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import VOCABULARY, make

APPLY = VerifiedReads.apply


def _llama() -> nn.Module:
    model: nn.Module = make("llama")
    return model


def _state(training: Training) -> dict[str, Any]:
    state = training.optimizer.state_dict()
    tensors = {f"{key}.{name}": value for key, of in state["state"].items() for name, value in of.items()}
    return copy.deepcopy({**training.model.local_state_dict(), **tensors})


def _flip_weight(file: Path) -> None:
    """Change a value of a model's tensor in ``file``."""
    spans = parsed_document(file.parent, read_document(file.parent)).metadata.storage_data
    place = next(
        each.start for index, each in spans.items() if index.fqn.startswith("model.") and each.file == file.name
    )
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def _refusal(act: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        act()
    return str(caught.value)


def _loads(rank: int, path: Path) -> tuple[list[str], list[str]]:
    """Load a checkpoint that is damaged on rank 1, then one whose file of rank 1 changes under the load."""
    parallel_state.initialize_model_parallel(1, 2)
    gather = parallel_state.get_exchange().gather
    training = Training(_llama, Layout(2))
    ids = torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(7))
    batch = {"input_ids": ids, "labels": ids}
    training.step(batch)
    parts = training.model, training.optimizer, training.scheduler
    for tag in ("whole", "damaged"):
        save_checkpoint(path, tag, *parts)
    training.step(batch)
    before = _state(training)
    gather(None)
    file = shard(path / "damaged", 1)
    if rank == 1:
        _flip_weight(file)
    gather(None)
    with pytest.raises(DamagedFile) as damaged:
        load_checkpoint(path, "damaged", *parts)
    assert is_same(_state(training), before)
    assert not hasattr(damaged.value, "__notes__")
    training.step(batch)
    save_checkpoint(path, "later", *parts)
    # Repair the file, and damage it again between the two reads.
    gather(None)
    if rank == 1:
        _flip_weight(file)

    def apply(reads: VerifiedReads) -> None:
        _flip_weight(file)
        APPLY(reads)

    gather(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "free_host_memory", lambda: 0)
        patch.setattr(VerifiedReads, "apply", apply if rank == 1 else APPLY)
        with pytest.raises(DamagedFile) as changed:
            load_checkpoint(path, "damaged", *parts)
    acts: list[Callable[[], object]] = [
        lambda: training.model.run_train(**batch),
        lambda: training.model.run_eval(**batch),
        lambda: save_checkpoint(path, "mixed", *parts),
        lambda: save_checkpoint(path, "mixed", *parts, async_save=True),
        lambda: save_pretrained(training.model, path / "mixed"),
        lambda: gather_state_dict(training.model),
    ]
    refused = [_refusal(act) for act in acts]
    with pytest.raises(DamagedFile):
        load_checkpoint(path, "damaged", *parts)
    refused.append(_refusal(acts[0]))
    assert not (path / "mixed").exists()
    load_checkpoint(path, "later", *parts)
    training.step(batch)
    save_checkpoint(path, "last", *parts)
    return changed.value.__notes__, refused


def test_all_ranks_refuse_steps_and_saves_until_a_load_succeeds(tmp_path: Path) -> None:
    for notes, refused in run_ranks(2, _loads, tmp_path):
        assert notes == [load.MIXED]
        for message in refused:
            assert f"The load of {tmp_path / 'damaged'} failed midway (DamagedFile: " in message
            assert "rank00001.safetensors is damaged: " in message
            assert "Values are of two origins since then: steps and saves are refused until a load succeeds." in message


def test_an_object_that_refuses_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the last to be loaded, when the model has its values: a load of other objects marks them whole."""
    training = small_training.Training()
    training.save(tmp_path, "step_0")

    def refuse(*_: object) -> None:
        raise KeyError("no such rate")

    with monkeypatch.context() as patch:
        patch.setattr(StepLR, "load_state_dict", refuse)
        with pytest.raises(KeyError):
            training.load(tmp_path)
    assert "no such rate" in _refusal(lambda: training.save(tmp_path, "step_1"))
    load_checkpoint(tmp_path, None, training.model)
    assert "no such rate" in _refusal(training.optimizer.step)
    save_checkpoint(tmp_path, "step_1", training.model)
    assert "no such rate" in _refusal(lambda: training.save(tmp_path, "step_2"))
    training.load(tmp_path, "step_0")
    training.optimizer.step()
    training.save(tmp_path, "step_2")


def test_a_checkpoint_without_names_of_a_failed_load_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = small_training.Training()
    save_checkpoint(tmp_path, "step_0", training.model[0])
    training.save(tmp_path, "step_1")

    def apply(reads: VerifiedReads) -> None:
        _flip_weight(shard(tmp_path / "step_1"))
        APPLY(reads)

    monkeypatch.setattr(load, "free_host_memory", lambda: 0)
    monkeypatch.setattr(VerifiedReads, "apply", apply)
    with pytest.raises(ValueError, match=r"step_0 lacks model.0.bias and 3 more that a failed load may have changed"):
        load_checkpoint(tmp_path, None, training.model, strict=False)
