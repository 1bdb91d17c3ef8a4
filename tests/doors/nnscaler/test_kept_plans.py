"""``parallelize`` and the plan in ``gen_savedir``; tensor-parallel outputs are whole."""

from pathlib import Path
from typing import Any

import pytest

from nxdpp.nnscaler import ComputeConfig, ParallelModule, parallelize
from tests.doors.nnscaler.modules import Blocks, sample_of
from tests.doors.nnscaler.own_folders import parallelize as parallelize_alone
from tests.support import models
from tests.support.run_ranks import run_ranks


def call(folder: Path, nmicros: int, policy: str = "pp", **kwargs: Any) -> None:
    config = ComputeConfig(2, 2, use_end2end=True, pas_config={"pipeline_nmicros": nmicros})
    module = Blocks()
    assert (
        parallelize(module, sample_of(module), policy, config, gen_savedir=folder, load_module=False, **kwargs) is None
    )


def test_a_plan_is_kept_and_found(tmp_path: Path) -> None:
    call(tmp_path, 2)
    (path,) = tmp_path.rglob("*.json")
    written = path.read_text()
    call(tmp_path, 2)
    call(tmp_path, 2, "hybrid")  # another policy takes the same plan
    assert path.read_text() == written
    assert '"microbatches": 2' in written

    with pytest.raises(RuntimeError, match="has a plan that does not fit: its pas_config is"):
        call(tmp_path, 3)
    with pytest.raises(ValueError, match="there is no policy 'ddp'"):
        call(tmp_path, 2, "ddp")
    call(tmp_path, 3, instance_name="three")
    call(tmp_path, 3, reuse="moo")
    assert '"microbatches": 3' in path.read_text()
    assert len([*tmp_path.rglob("*.json")]) == 2


def _outputs(rank: int) -> list[float]:
    batch, found = models.padded_batch(2), []
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    for vocabulary in (64, models.VOCABULARY):
        whole = models.make("llama", vocab_size=vocabulary)
        model = parallelize_alone(whole, batch, "tp", ComputeConfig(2, 2))
        assert isinstance(model, ParallelModule)
        for given in (batch, inputs):
            ours, theirs = model(**given), whole(**given)
            assert ours.logits.shape == theirs.logits.shape
            found.append((ours.logits - theirs.logits).abs().max().item())
            if given is batch:
                found.append((ours.loss - theirs.loss).abs().item())
    return found


@pytest.mark.one_python
def test_logits_of_a_transformers_model_are_whole_on_each_rank() -> None:
    for differences in run_ranks(2, _outputs):
        assert max(differences) < 1e-5
