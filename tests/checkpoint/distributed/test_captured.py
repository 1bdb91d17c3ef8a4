"""States of the random generators: a load in the same layout goes on with all of them, one in another with none."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from nxdpp.checkpoint.distributed import load_targets
from nxdpp.tensor.random import get_xla_rng_tracker
from tests.checkpoint.distributed.small_training import Training


def _drawn() -> dict[str, object]:
    """Numbers that each generator gives next, the second of each pair of normal ones included."""
    return {
        "python": [random.random(), random.gauss(0, 1)],
        "numpy": np.random.randn(3).tolist(),
        "torch": torch.rand(2).tolist(),
        "tracker": get_xla_rng_tracker().get_states(),
    }


@pytest.mark.parametrize("is_same_layout", [True, False])
def test_all_generators_go_on_in_the_same_layout_alone(
    is_same_layout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_xla_rng_tracker(), "_seeds", {"own": 3})
    # Each has the second number of a pair in its state.
    random.gauss(0, 1)
    np.random.randn()
    training = Training()
    training.save(tmp_path, "saved")
    saved = _drawn()

    def draw_others() -> None:
        random.seed(5)
        np.random.seed(6)
        torch.manual_seed(7)
        get_xla_rng_tracker().set_states({"other": 8})

    draw_others()
    others = _drawn()
    assert all(saved[name] != others[name] for name in saved)
    draw_others()
    if not is_same_layout:
        monkeypatch.setattr(load_targets, "layout", lambda: {"ranks": 1, "tensor": 1, "data": 1, "pipeline": 7})
    training.load(tmp_path)
    assert _drawn() == (saved if is_same_layout else others)
