"""Bit-for-bit checkpoints between any partitions, and to and from transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nxdpp import NxDPPModel, load_pretrained, parallel_state, save_pretrained
from tests.checkpoint.huggingface.checkpointed_models import (
    NAMES,
    differing,
    make,
    on_meta,
    saved_by_transformers,
    tensors_in,
    wrap,
)
from tests.support.run_ranks import run_ranks

Arguments = dict[str, Any]
PARTITIONS: dict[str, tuple[int, Arguments]] = {
    "one rank": (1, {}),
    "two ranks": (2, {}),
    "two ranks of two stages": (2, {"virtual_pipeline_size": 2}),
    "first and last stage on one rank": (2, {"schedule": "zb-v"}),
    "four ranks": (4, {}),
}


def partitions(*swept: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.sweep if name in swept else ()) for name in PARTITIONS]


# Four ranks are cut as two are. They load in test_one_partition_loads_what_another_saves.
SAVED = partitions("two ranks")
LOADED = partitions("two ranks of two stages", "four ranks")


def save_all(rank: int, ranks: int, arguments: Arguments, folder: Path) -> None:
    for name in NAMES:
        save_pretrained(wrap(make(name), ranks, **arguments), folder / name)


def load_all(rank: int, ranks: int, arguments: Arguments, folder: Path) -> dict[str, dict[str, list[str]]]:
    """For each model, the local tensors that differ from those that transformers loads."""
    wrong: dict[str, dict[str, list[str]]] = {}
    for name in NAMES:
        expected = type(make(name)).from_pretrained(folder / name).state_dict()
        real = wrap(make(name, seed=5), ranks, **arguments)
        before = dict(real.local_named_parameters())
        assert set(differing(dict(before), expected)) == set(before)
        load_pretrained(real, folder / name)
        assert all(parameter is before[key] for key, parameter in real.local_named_parameters())
        empty = wrap(on_meta(name), ranks, **arguments)
        load_pretrained(empty, folder / name)
        wrong[name] = {
            "real": differing(real.local_state_dict(), expected),
            "meta": differing(empty.local_state_dict(), expected),
            "buffers": differing(dict(empty.local_named_buffers()), dict(make(name).named_buffers())),
        }
    return wrong


@pytest.mark.parametrize("partition", SAVED)
def test_saved_files_equal_those_of_transformers(partition: str, tmp_path: Path) -> None:
    ranks, arguments = PARTITIONS[partition]
    run_ranks(ranks, save_all, ranks, arguments, tmp_path)

    for name in NAMES:
        model: Any = saved_by_transformers(name, tmp_path / "theirs" / name)
        saved, theirs = tensors_in(tmp_path / name), tensors_in(tmp_path / "theirs" / name)
        assert saved.keys() == theirs.keys()
        assert differing(saved, theirs) == []
        assert differing(type(model).from_pretrained(tmp_path / name).state_dict(), model.state_dict()) == []
        weights = {"model.safetensors"} if ranks == 1 else {"model.safetensors.index.json"}
        weights |= {f"model-{number:05d}-of-{ranks:05d}.safetensors" for number in range(1, ranks + 1) if ranks > 1}
        configuration = {file.name for file in (tmp_path / "theirs" / name).glob("*config.json")}
        assert {file.name for file in (tmp_path / name).iterdir()} == weights | configuration
        for file in configuration:
            assert (tmp_path / name / file).read_text() == (tmp_path / "theirs" / name / file).read_text()


@pytest.mark.parametrize("partition", LOADED)
def test_files_of_transformers_are_loaded(partition: str, tmp_path: Path) -> None:
    for name in NAMES:
        # Several files, split differently from the pipeline.
        saved_by_transformers(name, tmp_path / name, max_shard_size="40KB" if name != "gpt2" else "1GB")
    assert (tmp_path / "llama" / "model.safetensors.index.json").exists()
    ranks, arguments = PARTITIONS[partition]

    for wrong in run_ranks(ranks, load_all, ranks, arguments, tmp_path):
        assert wrong == {name: {"real": [], "meta": [], "buffers": []} for name in NAMES}


def test_one_partition_loads_what_another_saves(tmp_path: Path) -> None:
    run_ranks(2, save_all, 2, {"virtual_pipeline_size": 2}, tmp_path)

    for wrong in run_ranks(4, load_all, 4, {}, tmp_path):
        assert wrong == {name: {"real": [], "meta": [], "buffers": []} for name in NAMES}


def replicas(rank: int, folder: Path) -> list[str]:
    model = wrap(make("llama"), 2)
    save_pretrained(wrap(make("llama", seed=7), 2), folder)
    save_pretrained(model, folder)
    expected = {name: tensor.clone() for name, tensor in model.local_state_dict().items()}
    again = wrap(make("llama", seed=5), 2)
    # Saving ends on all ranks together, so no replica waits for files here.
    load_pretrained(again, folder)
    return differing(again.local_state_dict(), expected)


def test_only_the_first_replica_saves_under_the_usual_names(tmp_path: Path) -> None:
    assert run_ranks(4, replicas, tmp_path) == [[], [], [], []]

    assert sorted(file.name for file in tmp_path.glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def save_and_load_without_a_wrapper(rank: int, folder: Path) -> list[str]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    save_pretrained(NxDPPModel(make("tied_llama")), folder)
    loaded = NxDPPModel(on_meta("tied_llama"))
    with pytest.raises(RuntimeError, match=r"nxdpp\.load_pretrained\(model, directory\)"):
        loaded.part.check_materialised()
    load_pretrained(loaded, folder)
    loaded.part.check_materialised()
    return differing(loaded.local_module.state_dict(), make("tied_llama").state_dict())


def test_a_pipeline_is_saved_and_loaded(tmp_path: Path) -> None:
    assert run_ranks(2, save_and_load_without_a_wrapper, tmp_path) == [[], []]

    whole = make("tied_llama")
    assert differing(type(whole).from_pretrained(tmp_path).state_dict(), whole.state_dict()) == []


def trained_on(rank: int, ranks: int, folder: Path) -> dict[str, torch.Tensor]:
    """Weights after one more step with an optimizer that was made before the load."""
    model = wrap(make("tied_llama", seed=5), ranks, broadcast_and_average_loss=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    load_pretrained(model, folder)
    ids = torch.arange(32).view(4, 8)
    model.run_train(input_ids=ids, labels=ids)
    optimizer.step()
    return dict(model.local_state_dict())


def test_training_continues_with_an_earlier_optimizer(tmp_path: Path) -> None:
    saved_by_transformers("tied_llama", tmp_path)
    (whole,) = run_ranks(1, trained_on, 1, tmp_path)

    for part in run_ranks(2, trained_on, 2, tmp_path):
        for name, weight in part.items():
            torch.testing.assert_close(weight, whole[name], rtol=1e-5, atol=1e-5)
    assert not torch.equal(whole["model.norm.weight"], make("tied_llama").model.norm.weight)
