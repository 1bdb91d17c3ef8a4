"""``train_step`` and ``infer_step`` of end-to-end modules, beside one process."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from nxdpp.nnscaler import ComputeConfig, ParallelModule
from tests.doors.nnscaler.own_folders import parallelize
from tests.doors.nnscaler.trained_modules import WIDTH, Mlp, SwitchedMlp, TiedMlp, sample
from tests.support.run_ranks import run_ranks

MICROBATCHES = 3


def config(ranks: int, units: int, **pas_config: Any) -> ComputeConfig:
    return ComputeConfig(ranks, ranks * units, use_end2end=True, pas_config=pas_config)


def loaded(module: nn.Module, policy: str, compute_config: ComputeConfig, given: Any = None) -> ParallelModule:
    model = parallelize(module, {"data": sample(0) if given is None else given}, policy, compute_config)
    assert isinstance(model, ParallelModule)
    return model


def made(kind: type[nn.Module] = Mlp) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def samples_of(unit: int) -> list[dict[str, torch.Tensor]]:
    return [sample(unit * MICROBATCHES + number) for number in range(MICROBATCHES)]


def trained_whole(
    module: nn.Module,
    samples: Sequence[Any],
    transform: Callable[[int, torch.Tensor], torch.Tensor] = lambda number, loss: loss,
) -> list[Any]:
    """Accumulate gradients of ``module`` in one process; return its outputs."""
    outputs = []
    for number, each in enumerate(samples):
        outputs.append(module(each))
        loss = outputs[-1][0] if isinstance(outputs[-1], tuple) else outputs[-1]
        transform(number, loss).backward()
    return outputs


def assert_same_gradients(model: nn.Module, whole: nn.Module) -> None:
    """Assert gradients equal to the last bit."""
    for name, parameter in model.named_parameters():
        ours, theirs = parameter.grad, whole.get_parameter(name).grad
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


def assert_same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert not any(leaf.requires_grad for leaf in torch.utils._pytree.tree_leaves(ours))


def test_steps_on_ranks() -> None:
    run_ranks(4, _on_ranks)


def _on_ranks(rank: int) -> None:
    for cases in (
        (_sums_over_samples, _samples_of_different_shapes),
        (_over_tensor_ranks_too,),
    ):
        for case in cases:
            case(rank)
        parallel_state.destroy_model_parallel()


def _sums_over_samples(rank: int) -> None:
    """A pipeline over all ranks: everything is that of one process to the last bit."""
    settings = config(4, 1, pipeline_nmicros=MICROBATCHES)
    model, whole = loaded(made(SwitchedMlp), "pp", settings), made(SwitchedMlp)
    assert len(list(model.parameters())) == 1
    # The second step drops the gradients of the first one.
    model.train_step(samples_of(1))
    assert_same(model.train_step(samples_of(0)), trained_whole(whole, samples_of(0)))
    assert_same_gradients(model, whole)
    model.eval()
    whole.eval()
    with torch.inference_mode():
        assert_same(model.infer_step(samples_of(2)), [whole(each) for each in samples_of(2)])
    model.train()
    whole.train()

    with pytest.raises(ValueError, match=r"2 samples were given, and a step of this pipeline takes 3"):
        model.train_step(samples_of(0)[:2])
    with pytest.raises(ValueError, match="is_dummy_batch has 2 values for 3 samples"):
        model.train_step(samples_of(0), [True, False])
    _dummies_and_scales(model, whole)


def _dummies_and_scales(model: ParallelModule, whole: nn.Module) -> None:
    whole.zero_grad()
    outputs = model.train_step(samples_of(0), [False, True, False], lambda loss: loss * 3)
    assert_same(outputs, trained_whole(whole, samples_of(0), lambda number, loss: (0.0, 3.0)[number != 1] * loss))
    assert_same_gradients(model, whole)
    model.train_step(samples_of(0), [True] * MICROBATCHES)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def _over_tensor_ranks_too(rank: int) -> None:
    """Also with a weight that two stages share, of which each rank of a stage has a half."""
    settings = config(4, 1, pipeline_nmicros=MICROBATCHES, pp_size=2, pipeline_nstages=2)
    model, whole = loaded(made(TiedMlp), "hybrid", settings), made(TiedMlp)
    assert {parameter.shape for parameter in model.parameters()} == {(WIDTH // 2, WIDTH)}
    torch.testing.assert_close(model.train_step(samples_of(0)), trained_whole(whole, samples_of(0)))
    for name, parameter in model.named_parameters():
        gradient = whole.get_parameter(name).grad
        assert gradient is not None
        torch.testing.assert_close(parameter.grad, gradient.chunk(2)[rank % 2])


def _samples_of_different_shapes(rank: int) -> None:
    samples = [sample(seed, rows) for seed, rows in enumerate((2, 5, 1))]
    settings = config(4, 1, pipeline_nmicros=MICROBATCHES)
    model, whole = loaded(made(SwitchedMlp), "pp", settings), made(SwitchedMlp)
    assert_same(model.train_step(samples), trained_whole(whole, samples))
    assert_same_gradients(model, whole)
    assert_same(model.infer_step(samples[::-1]), [whole(each) for each in samples[::-1]])


class TestWithoutAPipeline:
    """One rank, which takes any number of samples, of any structure."""

    @pytest.fixture(autouse=True)
    def _one_rank(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()

    def test_any_number_of_samples(self) -> None:
        model, whole = loaded(made(SwitchedMlp), "dp", config(1, 1)), made(SwitchedMlp)
        model.train_step(samples_of(1)[:1])
        assert_same(model.train_step(samples_of(0)), trained_whole(whole, samples_of(0)))
        assert_same_gradients(model, whole)
        _dummies_and_scales(model, whole)
        model.eval()
        whole.eval()
        assert_same(model.infer_step(samples_of(0)), [whole(each) for each in samples_of(0)])

    def test_frozen_parameters_after_refresh(self) -> None:
        several = {"pipeline_nmicros": MICROBATCHES, "pipeline_nstages": 2, "pipeline_scheduler": "1f1b_interleaved"}
        for policy, settings in (("dp", {}), ("hybrid", several)):
            model, whole = loaded(made(), policy, config(1, 1, **settings)), made()
            model.train_step(samples_of(1))
            for each in (model, whole):
                each.get_parameter("layers.0.weight").requires_grad_(False)
            model.refresh()
            model.train_step(samples_of(0))
            trained_whole(whole, samples_of(0))
            assert model.get_parameter("layers.0.weight").grad is None
            for name, parameter in list(model.named_parameters())[1:]:
                gradient = whole.get_parameter(name).grad
                assert gradient is not None
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, gradient)
