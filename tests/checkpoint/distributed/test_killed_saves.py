"""Saves that are killed before any operation on a file: a whole checkpoint loads, at most the newest is missing."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.directory import LOCK
from tests.checkpoint.distributed import killed_saves
from tests.checkpoint.distributed.small_training import Training, is_same
from tests.checkpoint.watched_folder import states_of
from tests.support.run_program import run_program


@pytest.mark.parametrize(
    ("tag", "kept", "kind"), [("step_3", 1, "nxdpp"), ("step_2", None, "nxdpp"), ("step_2", 1, "dcp")]
)
def test_a_checkpoint_loads_whenever_the_save_is_killed(tag: str, kept: int | None, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoints"
    training = Training()
    for step in range(3):
        training.step()
        training.save(path, f"step_{step}")
    before = training.state()
    training.step()
    states = states_of(lambda: training.save(path, tag, num_kept_ckpts=kept, format=kind), path, tmp_path / "copies")
    expected = [before, training.state()]

    found = []
    for state in states:
        loaded = Training()
        assert loaded.load(state)["tag"] in ("step_2", tag)
        (number,) = (number for number, each in enumerate(expected) if is_same(loaded.state(), each))
        found.append(number)
        # Each checkpoint that counts is whole.
        for each in directory.tags(state):
            Training().load(state, each)
        # torch's document is there only with all that it names.
        if (state / tag / ".metadata").exists():
            read = _read_with_torch(state / tag)
            assert any(all(torch.equal(read[name], each[name]) for name in read) for each in expected)
    assert len(states) > 4
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, 1)
    # The next save removes what the killed one left, but for an empty directory, which can be that of others.
    for state in states:
        training.save(state, "step_4", num_kept_ckpts=1)
        assert {file.name for file in state.iterdir() if not is_empty(file)} == {"latest", "step_4", LOCK}
        assert len(list((state / "step_4").iterdir())) == 2


def _read_with_torch(path: Path) -> dict[str, torch.Tensor]:
    read = {name: torch.empty_like(tensor) for name, tensor in Training().model.state_dict().items()}
    load({"model": read}, checkpoint_id=path, no_dist=True)
    return read


def is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.sweep)])
def test_a_training_that_is_killed_resumes(kills: int) -> None:
    """A kill of a rank, of all ranks, and of torchrun's agent, each in another layout."""
    found = run_program(str(killed_saves.__file__), ["--ranks", "2", "--kills", str(kills)], 1)
    assert found.codes == [0], found.output
    assert f"{kills} of {kills} kills over 2 ranks" in found.output
