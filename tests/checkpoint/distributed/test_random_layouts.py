"""Any layout loads what any other has saved: drawn models, optimizers and layouts."""

from pathlib import Path

import pytest
import torch
from torch.optim import AdamW

from nxdpp import NxDPPModel, parallel_state
from nxdpp.checkpoint.distributed.document import Document
from nxdpp.checkpoint.distributed.optimizer_state import is_stepped
from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from tests.checkpoint.distributed.layouts import tensors_in
from tests.checkpoint.distributed.random_layouts import RANKS, Case
from tests.support import tied_parallel_model
from tests.support.run_ranks import run_ranks
from tests.support.tied_parallel_model import TiedLayer, TiedModel

_IDS = torch.randint(60, (8, 8), generator=torch.Generator().manual_seed(3))
BATCH = {"input_ids": _IDS, "labels": _IDS}


def _initialise(*sizes: int) -> None:
    """Divide the ranks into tensor groups and pipelines of these sizes."""
    if parallel_state.model_parallel_is_initialized():
        present = (
            parallel_state.get_tensor_model_parallel_size(),
            parallel_state.get_pipeline_model_parallel_size(),
        )
        if sizes == present:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(*sizes)


def _copies(path: Path, seeds: list[int]) -> None:
    """Train in a layout, save, load in another one and save."""
    for seed in seeds:
        case = Case(seed)
        try:
            for layout, is_source in zip(case.layouts, (True, False), strict=True):
                _initialise(layout.tensor, layout.pipeline)
                model, optimizer = case.wrapped(layout)
                if is_source:
                    model.run_train(**BATCH)
                    optimizer.step()
                else:
                    load_checkpoint(path / str(seed), "saved", model, optimizer)
                save_checkpoint(path / str(seed), "saved" if is_source else "loaded", model, optimizer)
        except Exception as error:
            error.add_note(case.text)
            raise


def _check(path: Path, seeds: list[int]) -> None:
    for seed in seeds:
        case = Case(seed)
        saved, expected = tensors_in(path / str(seed) / "saved")
        loaded, found = tensors_in(path / str(seed) / "loaded")
        _leave_out_unused(saved, expected)
        _leave_out_unused(loaded, found)
        assert found.keys() == expected.keys(), case.text
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), (name, case.text)
        for part in ("ties", "optimizer"):
            assert loaded.content[part] == saved.content[part], case.text


def _leave_out_unused(document: Document, tensors: dict[str, torch.Tensor]) -> None:
    """Leave out the state that Adagrad makes of frozen parameters: a sharding optimizer does not keep it."""
    states = document.content["optimizer"]["states"]
    for name in [name for name, state in states.items() if not is_stepped(state)]:
        for key in states.pop(name):
            tensors.pop(f"optimizer.{name}.{key}", None)


def _parts(path: Path) -> None:
    """Layers of NeuronX Distributed: a padded, tied vocabulary, and key-value heads that ranks copy."""
    ids = torch.randint(tied_parallel_model.VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(0))
    for number, (tensor, pipeline) in enumerate(PARTS):
        _initialise(tensor, pipeline)
        torch.manual_seed(0)
        model = NxDPPModel(TiedModel(True), TiedLayer, num_microbatches=2, use_zero1_optimizer=number % 2 == 1)
        model.move_model_to_device()
        own = model.local_parameters()
        optimizer = Zero1Optimizer(own, AdamW, grad_clipping=False) if number % 2 else AdamW(own)
        if number:
            load_checkpoint(path, str(number - 1), model, optimizer)
        else:
            model.run_train(ids=ids)
            optimizer.step()
        save_checkpoint(path, str(number), model, optimizer)


PARTS = (2, 1), (4, 1), (2, 2), (1, 1)
SEEDS = [[0], pytest.param(list(range(1, 20)), marks=pytest.mark.sweep)]


def _all(rank: int, path: Path, seeds: list[int]) -> None:
    _copies(path, seeds)
    _parts(path / "parts")


@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
def test_a_drawn_layout_loads_what_another_has_saved(seeds: list[int], tmp_path: Path) -> None:
    run_ranks(RANKS, _all, tmp_path, seeds, timeout=300.0)
    _check(tmp_path, seeds)
    document, expected = tensors_in(tmp_path / "parts" / "0")
    assert expected["model.embed.weight"].shape == (tied_parallel_model.VOCABULARY, tied_parallel_model.HIDDEN)
    assert expected["optimizer.embed.weight.exp_avg"].count_nonzero()
    assert document.content["ties"] == {"head.weight": "embed.weight"}
    for number in range(1, len(PARTS)):
        again, found = tensors_in(tmp_path / "parts" / str(number))
        assert again.content["optimizer"] == document.content["optimizer"]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
