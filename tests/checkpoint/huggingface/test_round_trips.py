"""Bit-for-bit checkpoints between any partitions, and to and from transformers."""

from pathlib import Path
from typing import Any

import torch

from nxdpp import load_pretrained, parallel_state, save_pretrained
from tests.checkpoint.huggingface.checkpointed_models import (
    differing,
    make,
    on_meta,
    saved_by_transformers,
    tensors_in,
    wrap,
)
from tests.support.run_ranks import run_ranks

NAMES = ("tied_llama", "t5", "mixtral")
WRONG: dict[str, list[str]] = {"real": [], "meta": [], "buffers": []}


def load_all(ranks: int, folder: Path, **arguments: Any) -> dict[str, dict[str, list[str]]]:
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


def of_two_ranks(rank: int, folder: Path) -> dict[str, dict[str, list[str]]]:
    """Save each model from two stages per rank; load those of transformers, the first and last stage on one rank."""
    for name in NAMES:
        save_pretrained(wrap(make(name), 2, virtual_pipeline_size=2), folder / "ours" / name)
    _train(folder)
    return load_all(2, folder / "theirs", schedule="zb-v")


def _train(folder: Path) -> None:
    """One more step with an optimizer that was made before the load has the weights of one process."""
    model = wrap(make("tied_llama", seed=5), 2, broadcast_and_average_loss=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    load_pretrained(model, folder / "theirs" / "tied_llama")
    ids = torch.arange(32).view(4, 8)
    model.run_train(input_ids=ids, labels=ids)
    optimizer.step()
    whole = make("tied_llama").to(ids.device)
    for half in ids.chunk(2):
        (whole(input_ids=half, labels=half).loss / 2).backward()
    torch.optim.SGD(whole.parameters(), lr=0.01).step()
    expected = whole.state_dict()
    for name, weight in model.local_state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-5)


def of_four_ranks(rank: int, folder: Path) -> dict[str, dict[str, list[str]]]:
    """Save from two replicas over an earlier checkpoint; load in four stages what two ranks have saved."""
    for seed in (7, 1234):
        replica = wrap(make("llama", seed), 2)
        save_pretrained(replica, folder / "replicas")
    # Saving ends on all ranks together, so no replica waits for files here.
    again = wrap(make("llama", seed=5), 2)
    load_pretrained(again, folder / "replicas")
    assert differing(again.local_state_dict(), dict(replica.local_state_dict())) == []
    parallel_state.destroy_model_parallel()
    return load_all(4, folder / "ours")


def test_saved_files_equal_those_of_transformers(tmp_path: Path) -> None:
    """And those of transformers are loaded, and what other partitions have saved."""
    theirs = tmp_path / "theirs"
    for name in NAMES:
        # Several files, split differently from the pipeline.
        saved_by_transformers(name, theirs / name, max_shard_size="40KB")
    for wrong in run_ranks(2, of_two_ranks, tmp_path):
        assert wrong == dict.fromkeys(NAMES, WRONG)
    usual = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    for name in NAMES:
        saved, expected = tensors_in(tmp_path / "ours" / name), tensors_in(theirs / name)
        assert saved.keys() == expected.keys()
        assert differing(saved, expected) == []
        whole = make(name)
        assert differing(type(whole).from_pretrained(tmp_path / "ours" / name).state_dict(), whole.state_dict()) == []
        configuration = {file.name for file in (theirs / name).glob("*config.json")}
        found = {file.name for file in (tmp_path / "ours" / name).iterdir()}
        assert found == usual | {"model.safetensors.index.json"} | configuration
        for file in configuration:
            assert (tmp_path / "ours" / name / file).read_text() == (theirs / name / file).read_text()
    for wrong in run_ranks(4, of_four_ranks, tmp_path):
        assert wrong == dict.fromkeys(NAMES, WRONG)
    assert {file.name for file in (tmp_path / "replicas").glob("*.safetensors")} == usual
