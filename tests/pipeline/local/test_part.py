"""Initial weights of models built on the meta device: equal under any partition, and trained like any others."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.initialization.deferred_init import deferred_init
from tests.support.models import MODELS, gradient_differences, make, padded_batch, reference, train_in_one_process
from tests.support.run_ranks import run_ranks

SEED = 5
NAMES = ("tied_llama", "gpt2", "mixtral")
TIED = {
    "tied_llama": {"model.embed_tokens.weight", "lm_head.weight"},
    "gpt2": {"transformer.wte.weight", "lm_head.weight"},
}
Values = dict[str, torch.Tensor]


def on_meta(name: str, **changes: Any) -> Any:
    torch.manual_seed(1234)
    with torch.device("meta"):
        model = MODELS[name](**changes)
    torch.manual_seed(SEED)
    return model


def initial_values(name: str, **arguments: Any) -> Values:
    """Local tensors of a model that is built on the meta device."""
    wrapped = NxDPPModel(on_meta(name), num_microbatches=2, **arguments)
    state = 100 + torch.distributed.get_rank()
    torch.manual_seed(state)
    wrapped.move_model_to_device()
    assert torch.initial_seed() == state
    tensors = [*wrapped.local_named_parameters(remove_duplicate=False), *wrapped.local_named_buffers()]
    return {key: tensor.detach().clone() for key, tensor in tensors}


def deferred_values(name: str, **arguments: Any) -> Values:
    torch.manual_seed(1234)
    wrapped = NxDPPModel(deferred_init(MODELS[name]), num_microbatches=2, **arguments)
    eager = make(name)
    for key, value in wrapped.local_named_buffers():
        assert torch.equal(value.cpu(), eager.get_buffer(key).cpu()), name
    return {key: value.detach() for key, value in wrapped.local_named_parameters(remove_duplicate=False)}


def gradients_of_materialised(name: str) -> dict[str, float | None]:
    """Train a step of a model that is built on the meta device, and of one process with its weights."""
    wrapped = NxDPPModel(on_meta(name), num_microbatches=2)
    wrapped.move_model_to_device()
    parts: list[Values] = [{}, {}]
    torch.distributed.all_gather_object(parts, wrapped.local_state_dict())
    whole = reference(make(name))
    whole.load_state_dict(parts[0] | parts[1], strict=False)
    batch = padded_batch(4)
    losses = train_in_one_process(whole, batch, 2)
    loss = wrapped.run_train(**batch)
    assert not isinstance(loss, list), "one loss is asked for"
    assert loss is None or torch.equal(loss, torch.stack(losses).mean())
    return gradient_differences(wrapped, whole)


def step_partly_on_meta() -> None:
    """One rank has values while another draws them."""
    model = make("llama", layers=2)
    with torch.device("meta"):
        model.model.layers[-1] = make("llama", layers=2).model.layers[-1]
    torch.manual_seed(SEED)
    wrapped = NxDPPModel(model, num_microbatches=2)
    is_first = parallel_state.get_pipeline_model_parallel_rank() == 0
    assert is_first == (not any(parameter.is_meta for parameter in wrapped.local_parameters()))
    wrapped.move_model_to_device()
    wrapped.run_train(**padded_batch(4))


def without_values(rank: int) -> dict[str, tuple[Values, Values, dict[str, float | None]]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    step_partly_on_meta()
    interleaved: dict[str, Any] = {"virtual_pipeline_size": 2}
    return {
        name: (
            initial_values(name, **interleaved),
            deferred_values(name, **interleaved),
            gradients_of_materialised(name),
        )
        for name in NAMES
    }


def check_parts(parts: Sequence[Values], whole: Values, case: str) -> None:
    """The parts have all tensors of ``whole``, bit for bit."""
    assert set().union(*parts) == set(whole), case
    differing = {key for part in parts for key, value in part.items() if not torch.equal(value, whole[key])}
    assert not differing, case


def test_initial_weights_do_not_depend_on_the_partition_and_train_as_one_process(one_rank: None) -> None:
    of_ranks = run_ranks(2, without_values)
    for name in NAMES:
        drawn, deferred, differences = zip(*(each[name] for each in of_ranks), strict=True)
        check_parts(drawn, initial_values(name), name)
        check_parts(deferred, dict(make(name).named_parameters(remove_duplicate=False)), name)
        for each in differences:
            # Gradients of a tied weight are summed in another order.
            assert set(each) <= TIED.get(name, set()), name
            assert all(difference is not None and difference < 1e-6 for difference in each.values()), name


def step_with_other_draws(rank: int, stages: int, is_deferred: bool) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
    if is_deferred:
        torch.manual_seed(7)
        torch.rand(rank)
        model = deferred_init(MODELS["llama"], layers=2)
    else:
        model = on_meta("llama", layers=2)
        torch.manual_seed(rank)
    wrapped = NxDPPModel(model, num_microbatches=2)
    wrapped.move_model_to_device()
    wrapped.run_train(**padded_batch(4))


@pytest.mark.parametrize(("stages", "is_deferred"), [(1, False), (2, True)])
def test_different_draws_of_ranks_are_refused(stages: int, is_deferred: bool) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, step_with_other_draws, stages, is_deferred)
    told = str(caught.value)
    for seed in (0, 1):
        drawn = r"7, state \w{16} of its" if is_deferred else str(seed)
        assert re.search(rf"rank {seed} \(rank {seed}\): initial weights from torch.initial_seed\(\) {drawn}", told)
    assert "torch.manual_seed" in told


def with_function(rank: int, ranks: int) -> Values:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    called: list[nn.Module] = []

    def initialise(module: nn.Module) -> None:
        """As the ``param_init_fn`` that the pipeline guide prints."""
        called.append(module)
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.5)
        elif "RMSNorm" in type(module).__name__:
            module.weight.data.fill_(1.0)  # type: ignore[operator]

    wrapped = NxDPPModel(on_meta("tied_llama"), num_microbatches=2, param_init_fn=initialise)
    assert len(called) == len(set(called))
    assert {type(module).__name__ for module in called} >= {"Linear", "LlamaRMSNorm", "LlamaRotaryEmbedding"}
    assert not any(tensor.is_meta for tensor in (*wrapped.parameters(), *wrapped.buffers()))
    wrapped.move_model_to_device()
    optimizer = torch.optim.SGD(wrapped.local_parameters(), lr=0.1)
    wrapped.run_train(**padded_batch(4))
    values = {name: tensor.detach().clone() for name, tensor in wrapped.local_named_parameters(remove_duplicate=False)}
    optimizer.step()
    assert not any(torch.equal(p, values[name]) for name, p in wrapped.local_named_parameters() if "weight" in name)
    return values | dict(wrapped.local_named_buffers())


def test_param_init_fn_initialises_at_construction() -> None:
    (whole,) = run_ranks(1, with_function, 1)
    parts = run_ranks(2, with_function, 2)

    assert set().union(*parts) == set(whole)
    assert all(torch.equal(value, whole[name]) for part in parts for name, value in part.items())
    assert torch.equal(whole["model.rotary_emb.inv_freq"], make("llama").model.rotary_emb.inv_freq)
    assert abs(whole["lm_head.weight"].std().item() - 0.5) < 0.05


def test_state_dict_fills_a_model_on_meta() -> None:
    parallel_state.initialize_debug(pipeline_model_parallel_rank=0, pipeline_model_parallel_size=2)
    try:
        whole = make("llama")
        wrapped = NxDPPModel(on_meta("llama"), num_microbatches=2)
        names = set(wrapped.local_state_dict())
        part = {name: value for name, value in whole.state_dict().items() if name in names}
        wrapped.load_local_state_dict(part)
        wrapped.move_model_to_device()

        # The state dict of the whole model, as in NxD.
        changed = {name: value + 1 for name, value in whole.state_dict().items()}
        assert not wrapped.load_state_dict(changed).unexpected_keys
        assert all(torch.equal(value, changed[name]) for name, value in wrapped.local_state_dict().items())
        wrapped.load_state_dict(whole.state_dict(), assign=True)
        assert all(torch.equal(value, part[name]) for name, value in wrapped.local_state_dict().items())
        assert torch.equal(wrapped.get_buffer("model.rotary_emb.inv_freq"), whole.model.rotary_emb.inv_freq)
    finally:
        parallel_state.destroy_model_parallel()


def test_optimizer_made_before_wrapping_is_refused_at_its_step_and_before_the_first_step_runs() -> None:
    parallel_state.initialize_debug(pipeline_model_parallel_rank=0, pipeline_model_parallel_size=2)
    try:
        model, other = make("llama"), make("llama")
        early, elsewhere = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
        wrapped = NxDPPModel(model, num_microbatches=2)
        for refused in (early.step, wrapped.part.check_optimizers):
            text = r"AdamW, holds 20 parameters that are not this rank's .*after wrapping"
            with pytest.raises(RuntimeError, match=text):
                refused()
        torch.optim.AdamW(wrapped.local_parameters()).step()
        elsewhere.step()
        del early, refused
        wrapped.part.check_optimizers()
    finally:
        parallel_state.destroy_model_parallel()
