"""``parallelize`` and the plan in ``gen_savedir``."""

from pathlib import Path
from typing import Any

import pytest

from nxdpp.nnscaler import ComputeConfig, parallelize
from tests.doors.nnscaler.modules import Blocks, sample_of


def call(folder: Path, nmicros: int, policy: str = "pp", layers: int = 4, **kwargs: Any) -> None:
    config = ComputeConfig(2, 2, use_end2end=True, pas_config={"pipeline_nmicros": nmicros})
    module = Blocks(layers)
    assert (
        parallelize(module, sample_of(module), policy, config, gen_savedir=folder, load_module=False, **kwargs) is None
    )


def test_a_plan_is_kept_and_found(tmp_path: Path) -> None:
    call(tmp_path, 2)
    (path,) = tmp_path.rglob("*.json")
    written = path.read_text()
    call(tmp_path, 2)
    call(tmp_path, 2, "hybrid")  # another policy takes the same plan
    call(tmp_path, 2, reuse="moo")
    assert path.read_text() == written
    assert '"microbatches": 2' in written

    with pytest.raises(RuntimeError, match="has a plan that does not fit: its pas_config is"):
        call(tmp_path, 3)
    with pytest.raises(RuntimeError, match="it is for a module with other parts"):
        call(tmp_path, 2, layers=5)
    with pytest.raises(ValueError, match="there is no policy 'ddp'"):
        call(tmp_path, 2, "ddp")
    call(tmp_path, 3, instance_name="three")
    # Each of the others takes the place of a plan that does not fit.
    for number, reuse in enumerate(("moo", "graph", "override"), 3):
        call(tmp_path, number, reuse=reuse)
        assert f'"microbatches": {number}' in path.read_text()
    assert len([*tmp_path.rglob("*.json")]) == 2
    path.write_text(written[:100])
    with pytest.raises(RuntimeError, match="plan"):
        call(tmp_path, 2)
    call(tmp_path, 2, reuse="moo")
    assert '"microbatches": 2' in path.read_text()
