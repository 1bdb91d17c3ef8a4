"""What save_pretrained leaves where it cannot write, what it replaces, and what it refuses."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.zoo_models import build
from nxdpp import NxDPPModel, load_pretrained, parallel_state, save_pretrained
from nxdpp.checkpoint import saved_directory
from nxdpp.checkpoint.save_plan import plan_shards
from nxdpp.checkpoint.shard_writer import Layout
from tests.checkpoint.checkpointed_models import differing, make, on_meta, tensors_in, wrap
from tests.distributed import run_ranks


@pytest.fixture(autouse=True)
def no_groups_left() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def save(rank: int, ranks: int, folder: Path, seed: int) -> None:
    save_pretrained(wrap(make("llama", seed=seed), ranks), folder)


def test_an_earlier_checkpoint_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    (tmp_path / "model-00003-of-00009.safetensors.unfinished").write_text("of a save that was killed")
    (tmp_path / ".configuration1.unfinished").mkdir()
    (tmp_path / ".configuration1.unfinished" / "config.json").write_text("{}")
    configuration = ["config.json", "generation_config.json"]
    for seed, ranks in enumerate((4, 2, 1, 1, 2)):
        run_ranks(ranks, save, ranks, tmp_path, seed)

        shards = [f"model-{number:05d}-of-{ranks:05d}.safetensors" for number in range(1, ranks + 1)]
        weights = ["model.safetensors"] if ranks == 1 else [*shards, "model.safetensors.index.json"]
        assert names(tmp_path) == [*configuration, *weights, "notes.txt"]
        assert differing(tensors_in(tmp_path), make("llama", seed=seed).state_dict()) == []


def error_of_saving(rank: int, ranks: int, folder: Path, failing_rank: int | None) -> str:
    """With which a rank fails; the writing of ``failing_rank`` is made to."""

    def write(*given: Any) -> None:
        Path(given[0]).write_bytes(b"half")
        raise OSError(28, "No space left on device", str(given[0]))

    wrapped = wrap(make("llama", seed=5), ranks)
    if rank == failing_rank:
        saved_directory.write_shard = write  # type: ignore[attr-defined, assignment]
    try:
        save_pretrained(wrapped, folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_full_disk_leaves_the_earlier_checkpoint(failing_rank: int, tmp_path: Path) -> None:
    run_ranks(2, save, 2, tmp_path, 1)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}

    messages = run_ranks(2, error_of_saving, 2, tmp_path, failing_rank)

    number = failing_rank + 1
    assert messages[failing_rank].startswith("OSError: [Errno 28] No space left on device")
    assert messages[1 - failing_rank].startswith(f"RuntimeError: {tmp_path} was not written: on rank {failing_rank}, ")
    assert all(f"{tmp_path}/model-0000{number}-of-00002.safetensors.unfinished" in message for message in messages)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    for message in run_ranks(2, error_of_saving, 2, tmp_path / "file", None):
        assert message.startswith("FileExistsError")
        assert str(tmp_path / "file") in message


def test_a_directory_that_cannot_be_made() -> None:
    for message in run_ranks(2, error_of_saving, 2, Path("/proc/1/nothing/here"), None):
        assert "/proc/1/nothing" in message


def test_a_save_that_is_killed_while_it_renames_leaves_no_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(2, save, 2, tmp_path, 1)
    wrapped = wrap(make("llama", seed=5))

    class Killed(BaseException):
        """Not an error: nothing cleans up after it."""

    replaced = []

    def replace(self: Path, target: Path) -> None:
        replaced.append(target.name)
        if target.name == "model.safetensors":
            raise Killed
        os.replace(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(Killed):
        save_pretrained(wrapped, tmp_path)
    monkeypatch.undo()

    assert replaced[-1] == "model.safetensors"
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        load_pretrained(wrapped, tmp_path)
    save_pretrained(wrapped, tmp_path)
    assert names(tmp_path) == ["config.json", "generation_config.json", "model.safetensors"]


def save_without_values(rank: int, folder: Path) -> str:
    # One rank has values, the other not.
    wrapped = wrap(on_meta("llama"), 2)
    if rank == 0:
        wrapped.materialise()
    with pytest.raises(ValueError, match=r"on the meta device") as caught:
        save_pretrained(wrapped, folder)
    return str(caught.value)


def test_a_model_without_values_is_refused_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(2, save_without_values, tmp_path / "none")

    assert "tensors of this rank are on the meta device and have no values to save, the first of them model." in second
    assert "load_pretrained(model, DIRECTORY) or model.materialise()" in second
    assert first.startswith(f"{tmp_path / 'none'} was not written: on rank 1, ValueError: ")
    assert not (tmp_path / "none").exists()


def save_with_tensor_parallelism(rank: int, folder: Path) -> str:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    with pytest.raises(NotImplementedError, match=r"\S") as caught:
        save_pretrained(NxDPPModel(make("llama")), folder)
    return str(caught.value)


def test_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    for message in run_ranks(2, save_with_tensor_parallelism, tmp_path):
        assert "saving over 2 tensor-parallel ranks is not built" in message


@pytest.mark.parametrize(
    ("sign", "kind"), [("hf_quantizer", "quantized models"), ("_hf_peft_config_loaded", "models with adapters")]
)
def test_models_of_another_format_are_refused(sign: str, kind: str, tmp_path: Path) -> None:
    model = make("llama")
    setattr(model, sign, True)
    wrapped = wrap(model)
    with pytest.raises(NotImplementedError, match=f"saving {kind} is not built"):
        save_pretrained(wrapped, tmp_path)


def test_tensors_that_are_one_in_the_file_and_on_two_ranks_here() -> None:
    model = build("masked-lm", "nomic_bert", "meta")
    layouts = {name: Layout(tuple(tensor.shape), tensor.dtype) for name, tensor in model.state_dict().items()}
    (whole,) = plan_shards(model, [], [layouts]).values()
    merged = [conversion for conversion in whole.conversions if len(conversion.names) > 1]
    assert merged
    first, *others = merged[0].names
    held = [{first: layouts.pop(first)}, layouts]

    with pytest.raises(NotImplementedError, match=r"which are on several ranks here") as caught:
        plan_shards(model, [], held)
    assert all(name in str(caught.value) for name in (first, *others))


def test_a_model_that_is_not_wrapped(tmp_path: Path) -> None:
    unwrapped: Any = make("llama")
    with pytest.raises(TypeError, match="save_pretrained is for an NxDPPModel"):
        save_pretrained(unwrapped, tmp_path)


def test_what_is_changed_on_the_model_after_wrapping_is_saved(tmp_path: Path) -> None:
    wrapped = wrap(make("llama"))
    wrapped.to(torch.bfloat16)
    save_pretrained(wrapped, tmp_path)

    expected = make("llama").to(torch.bfloat16).state_dict()
    assert differing(tensors_in(tmp_path), expected) == []
    assert '"dtype": "bfloat16"' in (tmp_path / "config.json").read_text()
