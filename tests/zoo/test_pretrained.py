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

TYPES = {
    "gpt_oss": "causal-lm",  # experts that are also one tensor in the file
    "swin": "image-classification",  # buffers of indices
}
TWO_RANKS = {
    "deepseek_v3": "causal-lm",  # routed experts, a buffer that is saved
    "nomic_bert": "masked-lm",  # other names, and fused tensors
}


@pytest.fixture(autouse=True)
def no_groups_left() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("name", TYPES)
def test_a_type_is_exact(name: str, tmp_path: Path) -> None:
    parallel_state.initialize_model_parallel()
    assert pretrained.compare(TYPES[name], name, tmp_path) == Verdict("exact")


def over_two_ranks(rank: int, folder: Path) -> list[str]:
    """Names of the local tensors that differ after saving and loading. The caller compares the saved files."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    wrong = []
    for name, task in TWO_RANKS.items():
        model = build(task, name)
        pretrained.randomise(model, 1)
        wrapped = NxDPPModel(model, num_microbatches=2)
        expected = {key: tensor.clone() for key, tensor in wrapped.local_state_dict().items()}
        save_pretrained(wrapped, folder / name)
        again = NxDPPModel(build(task, name, "meta"), num_microbatches=2)
        load_pretrained(again, folder / name)
        wrong += pretrained.differences(again.local_state_dict(), expected)
    return wrong


def test_over_two_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, over_two_ranks, tmp_path) == [[], []]
    for name, task in TWO_RANKS.items():
        model = build(task, name)
        pretrained.randomise(model, 1)
        model.save_pretrained(tmp_path / "theirs" / name)
        assert pretrained.differences(tensors_in(tmp_path / name), tensors_in(tmp_path / "theirs" / name)) == []
