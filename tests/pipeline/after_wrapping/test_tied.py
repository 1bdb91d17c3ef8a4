"""A tied weight is one parameter for what a script does after wrapping, by name, by module or by type."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nxdpp
from nxdpp import parallel_state
from tests.pipeline.after_wrapping.scripts import (
    VOCABULARY,
    WIDTH,
    Adapted,
    PipelinedTraining,
    Plain,
    Script,
    compare,
)
from tests.pipeline.after_wrapping.scripts import Training as Training
from tests.support.run_ranks import run_ranks


class Tied(Plain):
    """The head has the weight of the embedding, and a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight


def freeze_by_name(training: Training) -> None:
    for name, parameter in training.wrapped.named_parameters():
        if "embed" in name:
            parameter.requires_grad_(False)
    training.steps(2)
    for name, parameter in training.wrapped.named_parameters():
        if "embed" in name:
            parameter.requires_grad_(True)
    training.steps(2)


def tied_weight(training: Training) -> list[nn.Parameter]:
    return [parameter for name, parameter in training.wrapped.named_parameters() if name == "embed.weight"]


def adapt_head(training: Training) -> None:
    training.steps(2)
    training.model.head = Adapted(training.model.get_submodule("head"))
    training.steps(3)


def replace_under_all_names(training: Training) -> None:
    training.steps(2)
    weight = nn.Parameter(torch.linspace(-1, 1, VOCABULARY * WIDTH, dtype=torch.float64).view(VOCABULARY, WIDTH))
    training.model.get_submodule("embed").weight = weight
    training.model.get_submodule("head").weight = weight
    training.steps(3)


SCRIPTS: dict[str, tuple[Any, Script]] = {
    each.__name__: (lambda: Tied().double(), each)
    for each in (
        freeze_by_name,
        adapt_head,
        replace_under_all_names,
    )
}


def compared(rank: int) -> dict[str, Any]:
    compared = compare(rank, 2, SCRIPTS)
    wrapped = PipelinedTraining(Tied())
    tied = [name for name, _ in wrapped.wrapped.named_parameters() if name in ("embed.weight", "head.weight")]
    parts = (wrapped.model, wrapped.wrapped.local_module)
    weights = (
        {id(part.get_parameter(name)) for part in parts for name in ("embed.weight", "head.weight")} if tied else ()
    )
    return compared | {"tied": (tied, len(weights))}


def test_a_tie_stays_a_tie() -> None:
    for result in run_ranks(2, compared):
        assert result.pop("tied") == (["embed.weight"], 1)
        for name, (alone, pipelined) in result.items():
            # The sum of a tied gradient is in another order.
            assert pipelined == pytest.approx(alone, abs=1e-7), name


def named_alike(rank: int) -> tuple[list[str], list[str]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    alone, pipelined = Training(Tied().double()), PipelinedTraining(Tied().double())
    for training in (alone, pipelined):
        adapt_head(training)
    whole, own = (
        [name for name, _ in each.wrapped.named_parameters(remove_duplicate=False)] for each in (alone, pipelined)
    )
    state = alone.model.state_dict()
    pipelined.wrapped.load_state_dict(state)
    state.pop("head.base.weight")
    pipelined.wrapped.load_state_dict(state)
    assert torch.equal(tied_weight(pipelined)[0], state["embed.weight"])
    return whole, own


def test_a_tied_head_in_an_adapter_has_the_names_of_one_process() -> None:
    for rank, (whole, own) in enumerate(run_ranks(2, named_alike)):
        # In the same order, and without the names of other ranks.
        assert own == [name for name in whole if name in own]
        tied = ["embed.weight", "head.base.weight"]
        adapters = ["head.base.bias", "head.down.weight", "head.up.weight"]
        assert [name for name in own if "head" in name or "embed" in name] == tied + adapters * rank


def change_one(training: PipelinedTraining, is_last: bool) -> None:
    with torch.no_grad():
        training.model.get_parameter("head.weight")[3, 5] += is_last


def untie(training: PipelinedTraining, is_last: bool) -> None:
    training.model.get_submodule("head").weight = nn.Parameter(torch.ones(VOCABULARY, WIDTH))


def normalise_in_forward(training: PipelinedTraining, is_last: bool) -> None:
    training.model.embed.max_norm = 0.5  # type: ignore[union-attr]


def train_after(rank: int, change: Any, folder: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    training = PipelinedTraining(Tied())
    training.steps(2)
    change(training, rank == 1)
    if change is change_one:
        text = r"embed\.weight, which is tied, has other values on rank 1 than on rank 0"
        with pytest.raises(RuntimeError, match=text):
            nxdpp.save_pretrained(training.wrapped, folder)
        assert not Path(folder).exists()
        # Run 3 compares nothing.
        training.steps(1)
    training.steps(1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (change_one, r"a tied weight has other values on pipeline rank 1 .*\n.*\n.*\n.*Call move_model_to_device\(\)"),
        (
            untie,
            r"embed\.weight and head\.weight were one parameter .* Untie the model before it is wrapped, or put one",
        ),
        (normalise_in_forward, r"rank 0 has changed its copy in place \(nn\.Embedding\(max_norm=\.\.\.\) does\)"),
    ],
)
def test_copies_that_go_apart_are_refused(change: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=text):
        run_ranks(2, train_after, change, str(tmp_path / "saved"))


def save_untied(rank: int, folder: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=1)
    training = PipelinedTraining(Tied())
    training.steps(1)
    untie(training, True)
    training.steps(1)
    with pytest.raises(
        ValueError, match=r"embed\.weight and head\.weight were one parameter when the model was wrapped"
    ):
        nxdpp.save_pretrained(training.wrapped, folder)
    with pytest.raises(ValueError, match="Untie the model before it is wrapped"):
        nxdpp.save_checkpoint(folder, "1", model=training.wrapped)
    assert not any(Path(folder).rglob("*.*"))


def test_a_tie_that_was_undone_is_not_saved_as_one(tmp_path: Path) -> None:
    run_ranks(1, save_untied, str(tmp_path / "saved"))


NEW_TIE = "embed.weight and head.weight have become one parameter, and different pipeline ranks hold them"


def over_stages(rank: int) -> float:
    """Ties that are refused on every rank; returns the loss with the remedy, a tie before wrapping."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    for is_replaced, is_adapted in ((False, False), (True, False), (False, True)):
        torch.manual_seed(0)
        training = PipelinedTraining(Plain())
        training.steps(1)
        embed, head = training.model.get_submodule("embed"), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_replaced:
            embed.weight = nn.Parameter(torch.ones(VOCABULARY, WIDTH))
        if is_adapted:
            training.model.head = nn.Sequential(head)
        else:
            head = training.model.get_submodule("head")  # type: ignore[assignment]  # a Linear
        head.weight = embed.weight  # type: ignore[assignment]  # a parameter
        with pytest.raises(RuntimeError, match=NEW_TIE.replace("head", "head.0") if is_adapted else NEW_TIE):
            training.loss()
    return PipelinedTraining(tied_before()).loss()


def tied_before() -> nn.Module:
    torch.manual_seed(0)
    module = Plain()
    module.head.weight = module.embed.weight
    return module


def test_a_tie_over_stages_is_refused_on_every_rank_and_the_remedy_trains() -> None:
    assert run_ranks(2, over_stages) == [pytest.approx(Training(tied_before()).loss(), abs=1e-6)] * 2
