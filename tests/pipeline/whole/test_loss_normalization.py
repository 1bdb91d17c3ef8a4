"""Loss and gradients of the mean over all labels, over real processes, against one process on the whole batch."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralForCausalLM

from nxdpp import NxDPPModel, parallel_state
from nxdpp.schedules.families.registry import FAMILIES
from tests.support.kept_messages import KeptMessages
from tests.support.models import gradient_differences, make, microbatches, reference
from tests.support.run_ranks import run_ranks
from tests.support.uneven_labels import ONE_EMPTY, UNEVEN, MeanLayer, count_labels, mean_model, uneven_batch

COUNT = 4
NEAR = 1e-6


def start(stages: int = 2) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)


def wrap(model: nn.Module, **arguments: Any) -> NxDPPModel:
    arguments = {"num_microbatches": COUNT, "broadcast_and_average_loss": True, **arguments}
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        arguments["transformer_layer_cls"] = MeanLayer
    return NxDPPModel(model, **arguments)


def tokens(model: nn.Module, **arguments: Any) -> NxDPPModel:
    counts = {} if hasattr(model, "config") else {"count_items_fn": count_labels}
    return wrap(model, loss_normalization="tokens", **counts, **arguments)


def check_near(wrapped: NxDPPModel, whole: nn.Module, loss: Any, expected: torch.Tensor, case: Any) -> None:
    assert isinstance(loss, torch.Tensor)
    assert abs(loss.item() / expected.item() - 1) < NEAR, (case, loss, expected)
    differences = gradient_differences(wrapped, whole)
    assert all(distance is not None and distance < NEAR for distance in differences.values()), (case, differences)


def every_schedule() -> None:
    for name, family in FAMILIES.items():
        layers = 2 * family.default_chunks
        for kind in ("llama", "mean") if name in ("1f1b", "zb-v") else ("mean",):
            batch = uneven_batch(UNEVEN if kind == "llama" else ONE_EMPTY)
            model = make("llama", layers=layers) if kind == "llama" else mean_model(layers)
            whole = reference(model)
            wrapped = tokens(model, schedule=name)
            expected = whole(**batch)["loss"]
            expected.backward()
            if name in ("1f1b", "zb-v"):
                evaluated = wrapped.run_eval(**batch)
                assert isinstance(evaluated, torch.Tensor)
                assert abs(evaluated.item() / expected.item() - 1) < NEAR
            check_near(wrapped, whole, wrapped.run_train(**batch), expected, (name, kind))


def on_two_ranks(rank: int) -> None:
    start()
    every_schedule()
    give()
    route()


def test_every_schedule_has_the_mean_over_all_labels_of_the_batch() -> None:
    """Also: empty microbatches are counted, and a number that the user gives is not divided again."""
    run_ranks(2, on_two_ranks)


def replicate(rank: int) -> None:
    start()
    replica = parallel_state.get_data_parallel_rank()
    # The first replica has many labels, the second one few; then the second one has none.
    for kept in ((31, 20, 17, 31, 10, 4, 0, 1), (31, 20, 0, 4, 0, 0, 0, 0)):
        batch = uneven_batch(kept)
        own = {name: value.chunk(2)[replica] for name, value in batch.items()}
        for model in (make("llama", layers=4), mean_model(4)):
            whole = reference(model)
            wrapped = tokens(model, schedule="zb1p")
            expected = whole(**batch)["loss"]
            expected.backward()
            check_near(wrapped, whole, wrapped.run_train(**own), expected, kept)
            # A replica without items has gradients of zero, and is no surprise in a later step.
            later = uneven_batch((31, 20, 0, 4, 0, 0, 0, 0), seed=1)
            messages = KeptMessages()
            wrapped.run_train(**{name: value.chunk(2)[replica] for name, value in later.items()})
            assert messages.texts == []
    # The user counts the items of both replicas.
    model = make("llama", layers=2)
    whole = reference(model)
    wrapped = wrap(model)
    batch = uneven_batch((31, 20, 17, 31, 10, 4, 0, 1))
    own = {name: value.chunk(2)[replica] for name, value in batch.items()}
    counts = [int(count_labels({"labels": value})) for value in batch["labels"].chunk(2)]
    expected = whole(**batch)["loss"]
    expected.backward()
    loss = wrapped.run_train(**own, num_items_in_batch=sum(counts))
    check_near(wrapped, whole, loss, expected, "given")
    with pytest.raises(
        ValueError, match=rf"of all data-parallel replicas together; they gave \[{counts[0]}, {counts[1]}\]"
    ):
        wrapped.run_train(**own, num_items_in_batch=counts[replica])
    # Replicas with equally many labels give equal numbers.
    equal = uneven_batch((31, 20, 10, 4))
    with pytest.raises(ValueError, match=r"together; they gave \[130, 130\]"):
        wrapped.run_train(**equal, num_items_in_batch=130)
    wrapped.run_train(**equal, num_items_in_batch=260)


def test_replicas_share_the_mean() -> None:
    run_ranks(4, replicate)


def give() -> None:
    batch = uneven_batch((31, 20, 4))
    for items, rule in ((63, "microbatch"), (torch.tensor(63), "tokens")):
        model = make("llama", layers=2)
        whole = reference(model)
        wrapped = wrap(model, num_microbatches=3, loss_normalization=rule)
        loss = wrapped.run_train(**batch, num_items_in_batch=items)
        losses = []
        for part in microbatches(batch, 3):
            losses.append(whole(**part, num_items_in_batch=items).loss)
            losses[-1].backward()
        assert isinstance(loss, torch.Tensor)
        assert abs(loss.item() / sum(each.item() for each in losses) - 1) < NEAR
        assert gradient_differences(wrapped, whole) == {}, "bit for bit: it is not divided again"


def routed(layers: int = 2) -> MixtralForCausalLM:
    torch.manual_seed(3)
    model: MixtralForCausalLM = make("mixtral", layers=layers)
    model.config.output_router_logits = True
    model.router_aux_loss_coef = 0.1
    return model


def route() -> None:
    batch = uneven_batch(UNEVEN)
    items = sum(2 * kept for kept in UNEVEN)
    whole = routed()
    for rule, given, share in (("tokens", {}, 1 / COUNT), ("microbatch", {"num_items_in_batch": items}, 1.0)):
        model = routed()
        whole = reference(model)
        wrapped = wrap(model, loss_normalization=rule)
        loss = wrapped.run_train(**batch, **given)
        parts = [whole(**part, num_items_in_batch=items) for part in microbatches(batch, COUNT)]
        of_routers = sum(0.1 * part.aux_loss for part in parts)
        expected = sum(part.loss for part in parts) - (1 - share) * of_routers
        expected.backward()
        check_near(wrapped, whole, loss, expected, rule)
