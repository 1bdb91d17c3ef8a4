"""Types whose checkpoints differ from their state dicts in different ways.

``python -m tools.zoo pretrained`` compares all types.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nxdpp import NxDPPModel, load_pretrained, parallel_state, save_pretrained
from tests.checkpoint.huggingface.checkpointed_models import tensors_in
from tests.support.run_ranks import run_ranks
from tools.zoo import build, pretrained
from tools.zoo.sweep import Verdict

TYPES = [
    ("causal-lm", "deepseek_v3"),  # routed experts, a buffer that is saved
    ("causal-lm", "gpt_oss"),  # experts that are also one tensor in the file
    ("causal-lm", "jamba"),  # experts in every other layer
    ("causal-lm", "llama4_text"),  # experts of another layout
    ("causal-lm", "qwen2_moe"),  # experts, and one that is shared
    ("masked-lm", "jina_embeddings_v3"),  # query, key and value in one tensor
    ("masked-lm", "nomic_bert"),  # other names, and fused tensors
    ("seq2seq-lm", "bart"),  # an embedding tied three times
    ("seq2seq-lm", "marian"),  # positions that are not saved
    ("image-classification", "swin"),  # buffers of indices
]
TWO_RANKS = ("deepseek_v3", "nomic_bert")
# Their layouts are those of other types in the list, or two ranks load and save them.
MORE = ("jamba", "qwen2_moe", "jina_embeddings_v3", *TWO_RANKS)


@pytest.fixture(autouse=True)
def no_groups_left() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    ("task", "name"),
    [pytest.param(*types, marks=pytest.mark.sweep if types[1] in MORE else ()) for types in TYPES],
)
def test_a_type_is_exact(task: str, name: str, tmp_path: Path) -> None:
    parallel_state.initialize_model_parallel()
    assert pretrained.compare(task, name, tmp_path) == Verdict("exact")


def over_two_ranks(rank: int, task: str, name: str, folder: Path) -> list[str]:
    """Names of the local tensors that differ after saving and loading. The caller compares the saved file."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = build(task, name)
    pretrained.randomise(model, 1)
    wrapped = NxDPPModel(model, num_microbatches=2)
    expected = {key: tensor.clone() for key, tensor in wrapped.local_state_dict().items()}
    save_pretrained(wrapped, folder)
    again = NxDPPModel(build(task, name, "meta"), num_microbatches=2)
    load_pretrained(again, folder)
    return pretrained.differences(again.local_state_dict(), expected)


@pytest.mark.parametrize(("task", "name"), [types for types in TYPES if types[1] in TWO_RANKS])
def test_over_two_ranks(task: str, name: str, tmp_path: Path) -> None:
    assert run_ranks(2, over_two_ranks, task, name, tmp_path / "ours") == [[], []]

    model = build(task, name)
    pretrained.randomise(model, 1)
    model.save_pretrained(tmp_path / "theirs")
    assert pretrained.differences(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs")) == []


def test_a_difference_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel_state.initialize_model_parallel()
    monkeypatch.setattr(pretrained, "load_pretrained", lambda model, folder: model.materialise())
    verdict = pretrained.compare("causal-lm", "gpt2", tmp_path)

    assert verdict.result == "WRONG"
    assert "real: transformer.wte.weight" in verdict.words
    assert "meta: transformer.wte.weight" in verdict.words
