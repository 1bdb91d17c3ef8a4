"""Every schedule over real processes, bit for bit as one process; one launch runs many cases."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, apply_checkpoint, parallel_state
from nxdpp.schedules.families.registry import FAMILIES
from tests.pipeline.runtime.scheduled_models import (
    Chain,
    InPlace,
    Outputs,
    Skips,
    Tied,
    copy_of,
    make,
    rows,
    train_both,
    v_schedule,
    wrap,
)
from tests.support.models import (
    gradient_differences,
    padded_batch,
    reference,
    train_in_one_process,
)
from tests.support.models import make as make_huggingface
from tests.support.run_ranks import run_ranks

ONE_OF_EACH = ("1f1b", "interleaved", "zb1p", "zb-v", "dualpipe-v", "v-half")


def start(stages: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)


def chunks_of(name: str) -> int:
    return FAMILIES[name].default_chunks


def check_training(kind: Callable[[int], nn.Module], layers: int, microbatches: int, **arguments: Any) -> None:
    """Two steps without ``zero_grad`` have one process's losses and gradients, bit for bit but for a tied weight."""
    model = make(kind, layers)
    whole = copy_of(model)
    wrapped = wrap(model, microbatches, return_mb_loss=True, **arguments)
    case = f"{kind.__name__}, {layers} layers, {microbatches} microbatches, {arguments}"
    try:
        for step in range(2):
            listed, losses = train_both(wrapped, whole, microbatches, step)
            assert (listed is not None) == wrapped.holds_last_stage
            assert listed is None or len(listed) == microbatches
            assert listed is None or all(map(torch.equal, listed, losses)), "in the order of the microbatches"
    except Exception as error:
        error.add_note(case)
        raise
    differences = gradient_differences(wrapped, whole)
    if kind is Tied:
        assert set(differences) <= {"embedding.weight", "head.weight"}, case
        assert all(distance is not None and distance < 1e-6 for distance in differences.values()), (case, differences)
    else:
        assert not differences, (case, differences)


def every_family(rank: int) -> None:
    start(2)
    for name in FAMILIES:
        stages = 2 * chunks_of(name)
        if name in ONE_OF_EACH:
            # One layer more than stages: they are uneven.
            for microbatches in (1, 5):
                check_training(Chain, stages + 1, microbatches, schedule=name)
            check_training(InPlace, stages, 3, schedule=name)
        check_training(Tied, stages, 3, schedule=name)
    check_training(Skips, 4, 3, schedule=v_schedule(2, 3))
    check_training(Skips, 6, 3, virtual_pipeline_size=3)
    evaluate()


def test_every_family_trains_as_one_process() -> None:
    """test_nccl_rules has each family with skips on 4 ranks, and frees the outputs of stages."""
    run_ranks(2, every_family)


def evaluate() -> None:
    x = rows(6)
    parts = x.chunk(3)
    for name in ONE_OF_EACH:
        for kind in (Chain, Outputs):
            model = make(kind, 2 * chunks_of(name) + 1)
            whole = copy_of(model).eval()
            wrapped = wrap(model, 3, schedule=name, output_loss_value_spec=True if kind is Chain else None)
            wrapped.eval()
            result = wrapped.run_eval(x=x)
            assert (result is not None) == wrapped.holds_last_stage
            if result is None:
                continue
            with torch.no_grad():
                expected = [whole(part) for part in parts]
            if kind is Chain:
                assert torch.equal(result, torch.stack(expected).mean())
                continue
            for key, join in (("early", torch.cat), ("late", torch.cat), ("sum", torch.stack)):
                assert torch.equal(result[key], join([part[key] for part in expected]))


OPTIONS = {
    "interleaved": ("checkpoint", "frozen"),
    "zb-v": ("checkpoint", "frozen", "deallocate"),
}


def options(rank: int) -> None:
    start(2)
    batch = padded_batch(6)
    for name, chosen in OPTIONS.items():
        for option in chosen:
            model = make_huggingface("llama")
            if option == "frozen":
                for layer in (model.model.embed_tokens, model.model.layers[0], model.model.layers[2]):
                    layer.requires_grad_(False)
            whole = reference(model)
            wrapped = NxDPPModel(
                model, num_microbatches=3, schedule=name, deallocate_pipeline_outputs=option == "deallocate"
            )
            if option == "checkpoint":
                apply_checkpoint(wrapped)
            for _ in range(2):
                wrapped.run_train(**batch)
                train_in_one_process(whole, batch, 3)
            assert gradient_differences(wrapped, whole) == {}, (name, option)


def test_recomputation_frozen_layers_and_deallocation() -> None:
    run_ranks(2, options)


WRITTEN = [
    # Rank 0 has the outer stages, rank 1 the two in the middle; microbatch 1 is first everywhere.
    ["0F1", "0F0", "3F1", "3I1", "3F0", "3I0", "3W1", "3W0", "0B1", "0B0"],
    ["1F1", "2F1", "1F0", "2F0", "2B1", "1I1", "2B0", "1I0", "1W1", "1W0"],
]
UNEVEN = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "2F0", "1F1", "2F1", "2B0", "1B0", "2B1", "1B1"]]


def run_written(rank: int, folder: str) -> None:
    start(2)
    path = Path(folder) / "mine.csv"
    path.write_text("\n".join(",".join(actions) for actions in UNEVEN))
    for kind in (Chain, Skips, Tied):
        check_training(kind, 3, 2, schedule=UNEVEN if kind is Chain else path)
    model = make(Skips, 4)
    whole = copy_of(model)
    wrapped = wrap(model, 2, schedule=WRITTEN, virtual_pipeline_size=2, return_mb_loss=True)
    x = rows(4)
    listed = wrapped.run_train(x=x)
    losses = [whole(part) for part in x.chunk(2)]
    for loss in reversed(losses):
        (loss / 2).backward()
    assert gradient_differences(wrapped, whole) == {}, "as one process that takes the microbatches in that order"
    assert (listed is not None) == (rank == 0)
    assert not listed or all(map(torch.equal, listed, losses))
    with pytest.raises(ValueError, match=r"this pipeline has .*'microbatches': 3"):
        wrap(make(Chain, 4), 3, schedule=WRITTEN)
    with pytest.raises(ValueError, match="virtual_pipeline_size=3, but the schedule has up to 2 stages per rank"):
        wrap(make(Chain, 4), 2, schedule=WRITTEN, virtual_pipeline_size=3)
    with pytest.raises(ValueError, match="3 transformer layers cannot be split over 4 pipeline stages"):
        wrap(make(Chain, 3), 2, schedule=WRITTEN)
    with pytest.raises(ValueError, match="rank 1 has no action"):
        wrap(make(Chain, 4), 1, schedule=[["0F0", "0B0"], []])


def test_schedules_that_a_user_wrote(tmp_path: Path) -> None:
    run_ranks(2, run_written, str(tmp_path))
