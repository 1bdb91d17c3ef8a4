"""Arguments of the functions of checkpoints: refused on all ranks together, before anything is changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from nxdpp import parallel_state
from nxdpp.doors.nxd.checkpoint import finalize_checkpoint, load_checkpoint, save_checkpoint
from tests.checkpoint.distributed.small_training import Training, is_same
from tests.support.run_ranks import run_ranks

SAVE, LOAD = save_checkpoint, load_checkpoint

# Of rank 1, that differ from rank 0: a function, its arguments, and the sentence on rank 0.
DIFFERENT: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (SAVE, {"optimizer": None}, "save_checkpoint has optimizer=None on rank 1, and optimizer=AdamW on rank 0: make"),
    (SAVE, {"tag": "other"}, "has tag='other' on rank 1, and tag='tag' on rank 0"),
    (SAVE, {"num_kept_ckpts": 0}, "on rank 1, ValueError: num_kept_ckpts=0 must be a whole number of at least 1"),
    (SAVE, {"async_save": True}, "has async_save=True on rank 1, and async_save=False on rank 0"),
    (
        SAVE,
        {"user_content": 3},
        "has user_content= on rank 1 and not on rank 0, of which it is taken: give it on rank 0",
    ),
    (LOAD, {"strict": False}, "has strict=False on rank 1, and strict=True on rank 0"),
    (LOAD, {"call": SAVE}, "rank 0 calls load_checkpoint, and rank 1 calls save_checkpoint: make the same call"),
]


def _differently(rank: int, path: Path) -> list[str]:
    training = Training()
    # Each rank would take itself for the only one.
    for call in (lambda: training.save(path, "tag"), lambda: training.load(path), finalize_checkpoint):
        with pytest.raises(RuntimeError, match=r"call nxdpp.parallel_state.initialize_model_parallel\("):
            call()
    assert not list(path.iterdir())
    parallel_state.initialize_model_parallel()
    training.step()
    training.save(path, "tag")
    before = training.state()
    random = torch.get_rng_state()
    files = sorted(path.rglob("*"))
    found = []
    for function, changes, _ in DIFFERENT:
        given: dict[str, Any] = {
            "path": path, "tag": "tag", "model": training.model, "optimizer": training.optimizer,
            "scheduler": training.scheduler,
        }  # fmt: skip
        called = function
        if rank == 1:
            given.update(changes)
            called = given.pop("call", function)
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            called(**given)
        found.append(str(caught.value))
        assert sorted(path.rglob("*")) == files
    assert is_same(training.state(), before)
    assert torch.equal(torch.get_rng_state(), random)
    # The ranks are in step: the next calls are whole.
    save_checkpoint(path, 7, training.model, user_content={"of": "rank 0"} if rank == 0 else None)
    assert load_checkpoint(path, 7, training.model) == {"of": "rank 0"}
    finalize_checkpoint()
    return found


def test_arguments_that_differ_are_refused_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(2, _differently, tmp_path)
    for (_, changes, sentence), one, other in zip(DIFFERENT, first, second, strict=True):
        assert sentence in one, (changes, one)
        # A rank with a value that is refused by itself has its own error.
        assert one.removeprefix("on rank 1, ").partition("Error: ")[2] == other if "Error: " in one else one == other


def _model_and_optimizer() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": AdamW(model.parameters())}


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tag": ""}, ValueError, "tag='' must be the name of a directory"),
    *(({"tag": tag}, ValueError, "must be the name of a directory") for tag in
      ("a/b", "latest", "a\0", None, 1.5)),
    ({"path": "nowhere://bucket/run"}, ValueError, "'nowhere://bucket/run' is in a store that may show a file"),
    ({"model": nn.Linear(2, 2).state_dict()}, TypeError, "model is of class OrderedDict: give the module itself"),
    ({"optimizer": _model_and_optimizer()["optimizer"]}, ValueError, "optimizer= needs model= too"),
    ({"scheduler": lambda step: step}, TypeError, "scheduler is a function, without state_dict"),
    ({"num_kept_ckpts": True}, ValueError, r"num_kept_ckpts=True must be a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "sentence"), REFUSED)
def test_a_value_is_refused_before_a_file_is_written(
    changes: dict[str, Any], error: type[Exception], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=sentence):
        save_checkpoint(**{"path": tmp_path / "out", "tag": "tag", **changes})
    assert not list(tmp_path.iterdir())
    if not {"num_kept_ckpts"} & set(changes) and changes != {"tag": None}:
        with pytest.raises(error, match=sentence):
            load_checkpoint(**{"path": tmp_path / "out", "tag": "tag", **changes})
