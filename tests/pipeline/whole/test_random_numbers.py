"""The program's random numbers are alike on all ranks, whatever the model draws, and equal to those of one process."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import nxdpp
from nxdpp import NxDPPModel, parallel_state
from tests.support.run_ranks import run_ranks


class Encoder(nn.Module):
    """Layers that draw: dropout, and the noise of a VAE."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.draws = draws

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mean = self.inner(rows)
        if not (self.draws and self.training):
            return torch.tanh(mean)
        return functional.dropout(mean + torch.randn_like(mean), 0.3)


class Vae(nn.Module):
    """Four layers, of which one draws, or none."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Encoder(draws and number == 1) for number in range(4))

    def forward(self, rows: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return (rows - target).square().mean()


def wrapped(stages: int, draws: bool = True, tensor: int = 1) -> Any:
    """A pipelined ``Vae`` with ``stages``, on a started world with groups of ``tensor`` ranks."""
    parallel_state.initialize_model_parallel(tensor, stages, hang_timeout=60)
    torch.manual_seed(0)
    return NxDPPModel(Vae(draws), transformer_layer_cls=Encoder, num_microbatches=2, broadcast_and_average_loss=True)


def loader() -> Any:
    """A shuffled ``DataLoader`` without a generator of its own."""
    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(data, torch.arange(16)), batch_size=4, shuffle=True)


def noise() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and targets of a training by flow matching: noise, times and dropped labels drawn by the script."""
    drawn, time, drop = torch.randn(4, 8), torch.rand(4, 1), torch.rand(4) < 0.5
    return (1 - time) * drawn + time * torch.where(drop[:, None], 0.0, 1.0), drawn


def masks() -> list[torch.Tensor]:
    """The outputs of a dropout of ones in each microbatch, on this rank."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, hang_timeout=60)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2)]
    model = NxDPPModel(
        nn.Sequential(*layers),
        transformer_layer_cls=nn.Sequential,
        loss_fn=lambda output: output.mean(),
        num_microbatches=2,
    )
    seen: list[torch.Tensor] = []
    for module in model.local_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _, __, output: seen.append(output == 0))
    model.run_train(input=torch.ones(4, 8))
    return seen


def scripts(rank: int) -> tuple[list[list[Any]], list[torch.Tensor]]:
    """Orders of rows and sums of noise that scripts draw, where layers draw too and where none does."""
    found: list[list[Any]] = []
    for draws in (True, False):
        model = wrapped(2, draws)
        found.append([])
        for _ in range(2):
            for rows, numbers in loader():
                model.run_train(rows=rows, target=rows)
                found[-1].append(numbers.tolist())
        for _ in range(4):
            rows, target = noise()
            model.run_train(rows=rows, target=target)
            model.run_eval(rows=rows, target=target)
            found[-1].append(float(rows.sum()))
        parallel_state.destroy_model_parallel()
    return found, masks()


@pytest.mark.parametrize("ranks", [2, 4])
def test_noise_of_the_script_is_alike_on_all_ranks(ranks: int) -> None:
    torch.manual_seed(0)
    Vae(draws=False)
    expected = [numbers.tolist() for _ in range(2) for _, numbers in loader()]
    expected += [float(noise()[0].sum()) for _ in range(4)]
    results = run_ranks(ranks, scripts)
    first, *others = (found for found, _ in results)
    assert all(drawn == first for drawn in others)
    drawn, without_draws = first
    assert len({*map(str, drawn)}) == 12
    assert without_draws == expected, "those of one process, where no layer draws"
    # Stages and replicas draw other masks in each microbatch.
    of_layers = [mask for _, masks_of_rank in results for mask in masks_of_rank]
    assert len(of_layers) == 2 * ranks
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(of_layers, 2))


def losses_of() -> list[list[float]]:
    """Losses of three steps on the same rows after each seed, with an evaluation without draws among them."""
    model = wrapped(2)
    rows = torch.ones(4, 8)
    losses: list[list[float]] = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append([])
        for _ in range(3):
            losses[-1].append(float(model.run_train(rows=rows, target=rows)))
            if len(losses) > 1:
                model.eval()
                model.run_eval(rows=rows, target=rows)
                model.train()
    parallel_state.destroy_model_parallel()
    return losses


def on_two_ranks(rank: int) -> tuple[list[list[float]], list[float], list[list[float]]]:
    model = later(2)
    begun_later = [float(model.run_train(input=torch.ones(4, 8))) for _ in range(5)]
    parallel_state.destroy_model_parallel()
    one_replica = [drawing_in_one_replica(steps, evaluates) for steps in ([0, 1], [2]) for evaluates in (False, True)]
    return losses_of(), begun_later, one_replica


def test_a_seed_gives_all_later_numbers_and_generators_are_alike_on_all_ranks() -> None:
    first, second = run_ranks(2, on_two_ranks)
    for seeds, begun_later, one_replica in (first, second):
        assert seeds[0] == seeds[1]
        assert len({*seeds[0], *seeds[2]}) == 6
        # Layers that begin to draw later have other numbers in each step.
        assert len({*begun_later[2:]}) == 3
        assert all(len({*drawn}) == 4 for drawn in one_replica)
    assert first[2] == second[2]


class OnImages(nn.Module):
    """A layer that draws for rows above 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.inner(rows), 0.5) if rows.sum() > 0 else self.inner(rows)


def drawing_in_one_replica(steps: list[int], evaluates: bool) -> list[float]:
    """Numbers of the script after each of four steps, in some of which the layers of the first replica alone draw."""
    parallel_state.initialize_model_parallel(hang_timeout=60)
    torch.manual_seed(0)
    model = NxDPPModel(
        nn.Sequential(OnImages()),
        transformer_layer_cls=OnImages,
        loss_fn=lambda output: output.square().mean(),
        num_microbatches=2,
    )
    drawn = []
    for number in range(4):
        is_drawing = number in steps and parallel_state.get_data_parallel_rank() == 0
        # Other rows are a step of another signature, which is new to one replica.
        rows = torch.ones(8, 8) if is_drawing else -torch.ones(4, 8)
        if not evaluates:
            model.run_train(input=rows)
        elif is_drawing:
            model.run_eval(input=rows)
        drawn.append(float(torch.rand(())))
    parallel_state.destroy_model_parallel()
    return drawn


class Later(nn.Module):
    """A layer that draws from its third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.number = itertools.count()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.inner(rows)
        return rows if next(self.number) < 2 else functional.dropout(rows, 0.5)


def later(stages: int) -> Any:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages, hang_timeout=60)
    torch.manual_seed(0)
    return NxDPPModel(
        nn.Sequential(*(Later() for _ in range(stages))),
        transformer_layer_cls=Later,
        loss_fn=lambda output: output.square().mean(),
        broadcast_and_average_loss=True,
    )


def resuming(rank: int, folder: Path, first: int, last: int) -> list[tuple[float, float]]:
    """Losses, and a number of the script after each step, of a training that is saved after its step 3 of 6."""
    model = later(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if first:
        for module in model.local_modules():
            if isinstance(module, Later):
                module.number = itertools.count(2)
        nxdpp.load_checkpoint(folder, model=model, optimizer=optimizer)
    seen = []
    for number in range(first, last):
        loss = float(model.run_train(input=torch.ones(4, 8)))
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss, float(torch.rand(1)) if number != 3 else 0.0))
        if not first and number == 2:
            nxdpp.save_checkpoint(folder, "half", model, optimizer)
    return seen


def test_a_training_whose_layers_begin_to_draw_later_resumes_to_the_bit(tmp_path: Path) -> None:
    whole = run_ranks(2, resuming, tmp_path, 0, 6)
    rest = run_ranks(2, resuming, tmp_path, 3, 6)
    assert [seen[3:] for seen in whole] == rest
    assert len({loss for loss, _ in whole[0]}) == 6


@pytest.mark.cpu_only("layers draw other numbers on a device than the process that is compared")
def test_one_stage_draws_the_numbers_of_one_process() -> None:
    torch.manual_seed(0)
    whole, rows = Vae(draws=True), torch.ones(4, 8)
    expected = [sum(whole(half, half).item() for half in rows.chunk(2)) / 2 for _ in range(3)]
    model = wrapped(1)
    losses = [float(model.run_train(rows=rows, target=rows)) for _ in range(3)]
    parallel_state.destroy_model_parallel()
    assert losses == pytest.approx(expected, rel=1e-6)


def tensor_ranks_apart(rank: int) -> None:
    """Steps of two tensor ranks that draw, before the third of which rank 1 alone draws a number more."""
    model = wrapped(1, tensor=2)
    for number in range(3):
        if number == 2 and rank == 1:
            torch.rand(1)
        model.run_train(rows=torch.ones(4, 8), target=torch.ones(4, 8))


def test_tensor_ranks_whose_layers_would_draw_other_masks_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"between tensor-parallel rank 0 .* would draw other masks"):
        run_ranks(2, tensor_ranks_apart)
