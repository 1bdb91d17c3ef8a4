"""Saves over an existing checkpoint, killed at any moment: the earlier or the new checkpoint loads, complete."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import LlamaForCausalLM

from nxdpp import load_pretrained, save_pretrained
from nxdpp.checkpoint.huggingface import save, write_directory
from nxdpp.checkpoint.huggingface.read_directory import stored_tensors
from tests.checkpoint.huggingface.checkpointed_models import differing, make, tensors_in, wrap
from tests.checkpoint.watched_folder import states_of

pytestmark = pytest.mark.usefixtures("no_groups_left")


def model(seed: int, layers: int = 1) -> Any:
    return make("llama", seed, layers=layers)


def save_in(model: Any, folder: Path, bytes_of_a_file: int) -> None:
    write_directory.SHARD_BYTES = bytes_of_a_file
    save_pretrained(wrap(model), folder)


WHOLE, SHARDS = 10**9, 20_000
NAME = "other"
"""Of an adapter, which is a folder too."""


@pytest.mark.parametrize(("before", "after"), [(WHOLE, SHARDS), (SHARDS, WHOLE), (SHARDS, SHARDS)])
def test_a_checkpoint_loads_whenever_the_save_is_killed(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_directory, "SHARD_BYTES", WHOLE)
    folder = tmp_path / "checkpoint"
    save_in(model(1), folder, before)
    states = states_of(lambda: save_in(model(2, layers=2), folder, after), folder, tmp_path / "copies")

    expected = {False: model(1).state_dict(), True: model(2, layers=2).state_dict()}
    found = [is_new(LlamaForCausalLM.from_pretrained(state).state_dict(), expected) for state in states]
    assert len(states) > 4
    assert found == sorted(found)
    assert (found[0], found[-1]) == (False, True)
    for state, new in zip(states, found, strict=True):
        assert is_new(values_in(state), expected) == new
    if before == after == SHARDS:
        # Files get usual names before the index has them, and have the others after that.
        assert {has_usual for state in states for has_usual in usual_names_in_index(state)} == {False, True}
    # The next save removes what the killed one left.
    wrapped, last = wrap(model(4)), model(4).state_dict()
    for state in states[::3]:
        save_pretrained(wrapped, state)
        assert leftovers(state) == []
        assert differing(values_in(state), last) == []


def values_in(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that ``load_pretrained`` reads from ``folder``."""
    return {name: tensor.read(tensor.dtype) for name, tensor in stored_tensors(folder).items()}


def is_new(state: dict[str, torch.Tensor], expected: dict[bool, dict[str, torch.Tensor]]) -> bool:
    (new,) = (
        new for new, tensors in expected.items() if tensors.keys() == state.keys() and differing(state, tensors) == []
    )
    return new


def usual_names_in_index(folder: Path) -> list[bool]:
    """Return whether the index has the usual name of each file that has another one too."""
    index = (folder / "model.safetensors.index.json").read_text()
    tagged = {path.name[len("model-01234567") :] for path in folder.glob("model-????????-*.safetensors")}
    return [f"model{number}" in index for number in tagged if (folder / f"model{number}").exists()]


def leftovers(folder: Path) -> list[str]:
    """Files of ``folder`` that are of no checkpoint, or of an earlier one."""
    names = {path.name for path in folder.iterdir()}
    configuration = {"config.json", "generation_config.json"}
    assert "transformers_weights" not in (folder / "config.json").read_text()
    if "model.safetensors" in names:
        return sorted(names - configuration - {"model.safetensors"})
    index = folder / "model.safetensors.index.json"
    used = {name for name in names if name in index.read_text()}
    return sorted(names - configuration - used - {index.name})


def test_a_save_that_fails_while_it_replaces_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_directory, "SHARD_BYTES", SHARDS)
    save_pretrained(wrap(make("llama", seed=1)), tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    replace = Path.replace

    def failing(self: Path, target: Path) -> Path:
        if "-00003-of-" in target.name:
            raise OSError("no more")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(OSError, match="no more"):
        save_pretrained(wrap(make("llama", seed=2)), tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_an_adapter_whose_save_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "adapter"
    save_pretrained(wrap(with_lora(4, 1.0)), folder)
    new = wrap(with_lora(8, 2.0))
    states = states_of(lambda: save_pretrained(new, folder), folder, tmp_path / "copies")

    # PEFT loads one of the two, or nothing. Two configurations are never mixed.
    found = [value_of_adapter(state / NAME) for state in states]
    assert (found[0], found[-1]) == ((4, 1.0), (8, 2.0))
    assert found == sorted(found, key=[(4, 1.0), None, (8, 2.0)].index)
    assert None in found
    # load_pretrained loads one of the two in every state.
    loading = {lora: wrap(with_lora(lora, 0.0)) for lora in (4, 8)}
    for state, known in zip(states, found, strict=True):
        lora, value = known or (8, 2.0)
        for parameter in lora_parameters(loading[lora].local_module):
            parameter.data.zero_()
        load_pretrained(loading[lora], state / NAME)
        assert values_of_adapter(loading[lora].local_module) == {value}
    # The next save completes what the killed one left, also where it fails then, and leaves no other files.
    between = [state for state, known in zip(states, found, strict=True) if known is None]
    assert value_of_adapter(between[0] / ".unfinished" / "complete" / NAME) == (8, 2.0)
    for state in (states[1], between[-1]):
        if state in between:
            with monkeypatch.context() as patch:
                patch.setattr(save, "write_adapter", failing)
                with pytest.raises(OSError, match="no more"):
                    save_pretrained(new, state)
            assert value_of_adapter(state / NAME) == (8, 2.0)
        save_pretrained(new, state)
        files = [{path.relative_to(top) for path in top.rglob("*")} for top in (state, folder)]
        assert files[0] == files[1]
        assert differing(tensors_in(state / NAME), tensors_in(folder / NAME)) == []


def failing(*_: Any) -> None:
    raise OSError("no more")


def with_lora(rank: int, value: float) -> Any:
    config = peft.LoraConfig(r=rank, target_modules=["q_proj"])
    adapted: Any = peft.get_peft_model(model(1), config, adapter_name=NAME)
    for parameter in lora_parameters(adapted):
        parameter.data.fill_(value)
    return adapted


def lora_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for name, parameter in module.named_parameters() if "lora" in name]


def values_of_adapter(module: torch.nn.Module) -> set[float]:
    return {value for parameter in lora_parameters(module) for value in parameter.unique().tolist()}


def value_of_adapter(folder: Path) -> tuple[int, float] | None:
    """The rank and the value of the adapter in ``folder``, or ``None`` if PEFT finds none."""
    if not (folder / "adapter_config.json").exists():
        return None
    loaded: Any = peft.PeftModel.from_pretrained(model(1), str(folder))
    (value,) = values_of_adapter(loaded)
    return loaded.peft_config["default"].r, value
