"""Models on XLA ranks: moved, built on other devices, and initialised later, with the values of the CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import nxdpp
from nxdpp import NxDPPModel, parallel_layers, parallel_state
from tests.support.run_ranks import run_ranks
from tests.support.xla_ranks import run_xla_ranks
from tests.xla.models import batch, layer_class, llama


def _wrapped(model: nn.Module) -> NxDPPModel:
    return NxDPPModel(
        model, transformer_layer_cls=layer_class(model), num_microbatches=2, broadcast_and_average_loss=True
    )


def _trained(model: NxDPPModel) -> list[float]:
    """Losses of two steps; a weight that has lost its tie gives another one in the second."""
    optimizer = torch.optim.AdamW(list(model.local_parameters()), lr=1e-2)
    losses = []
    for number in range(2):
        loss = model.run_train(**batch(number))
        assert isinstance(loss, torch.Tensor)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _moved(where: Any = None) -> NxDPPModel:
    model = _wrapped(_tied())
    model.move_model_to_device(where)
    return model


def _tied() -> nn.Module:
    return llama(tie_word_embeddings=True, num_hidden_layers=2)


def _moved_before() -> NxDPPModel:
    model = _tied()
    parallel_layers.move_model_to_device(model, parallel_state.local_device())
    return _wrapped(model)


def _tied_again() -> NxDPPModel:
    model: Any = _tied()
    model.to(parallel_state.local_device())
    model.tie_weights()
    return _wrapped(model)


def _wrapper_moved() -> NxDPPModel:
    return _wrapped(_tied()).to(parallel_state.local_device())


def _deferred() -> NxDPPModel:
    model = _wrapped(nxdpp.deferred_init(_tied))
    model.move_model_to_device()
    return model


_OF_THE_CPU: dict[str, Callable[[], NxDPPModel]] = {
    "by default": _moved,
    "moved before": _moved_before,
    "tied again": _tied_again,
    "model.to": _wrapper_moved,
    "deferred": _deferred,
    "not moved": lambda: _wrapped(_tied()),
}


def _on_meta() -> NxDPPModel:
    with nxdpp.init_on_device(torch.device("meta")):
        model = _wrapped(_tied())
    model.move_model_to_device()
    return model


def _states(rank: int, device: str | None) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, device=device)
    losses = {name: _trained(make()) for name, make in _OF_THE_CPU.items()}
    return {
        "losses": losses,
        "meta": _trained(_on_meta()),
        "refusals": _refusals() if device else {},
        "built": _built(),
    }


def _built() -> dict[str, Any]:
    """A model that is built on the device itself: its tensors are there, and its ties are kept."""
    found = {}
    device = parallel_state.local_device()
    for name, context in (("init_on_device", nxdpp.init_on_device(device)), ("torch.device", device)):
        with context:
            model: Any = _tied()
        devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
        found[name] = (devices, model.lm_head.weight is model.model.embed_tokens.weight)
    losses = _trained(_wrapped(model))
    return {**found, "is trained": losses[1] != losses[0]}


def _refusals() -> dict[str, str]:
    """The refusals, and that the remedy of each works."""
    found = {}
    untied = _tied().to("xla")
    found["lost ties"] = _message(ValueError, lambda: _wrapped(untied))
    model = _wrapped(_tied())
    before = torch.optim.AdamW(list(model.local_parameters()))
    moves: dict[str, Callable[[], object]] = {"move": model.move_model_to_device, "to": lambda: model.to("xla")}
    for name, move in moves.items():
        found[f"optimizer and {name}"] = _message(RuntimeError, move)
    del before
    model.move_model_to_device()
    _trained(model)
    model.local_module.to("cpu")
    found["after a step"] = _message(RuntimeError, lambda: model.run_train(**batch(0)))
    model.refresh()
    _trained(model)
    found["no device"] = _message(ValueError, lambda: model.move_model_to_device("xla:1"))
    with torch.device("xla"):
        found["deferred"] = _message(ValueError, lambda: nxdpp.deferred_init(_tied))
    return found


def _message(kind: type[Exception], act: Callable[[], object]) -> str:
    try:
        act()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was refused")


def test_moved_built_and_deferred_models_train_as_on_the_cpu() -> None:
    on_cpu = run_ranks(2, _states, None)
    on_xla = run_xla_ranks(2, _states, "xla")
    expected = torch.tensor(on_cpu[0]["losses"]["by default"])
    meta = torch.tensor(on_cpu[0]["meta"])
    for rank in on_xla:
        for name, losses in rank["losses"].items():
            torch.testing.assert_close(torch.tensor(losses), expected, rtol=0, atol=2e-5, msg=name)
        torch.testing.assert_close(torch.tensor(rank["meta"]), meta, rtol=0, atol=2e-5)
        on_device = ({"xla"}, True)
        assert rank["built"] == {"init_on_device": on_device, "torch.device": on_device, "is trained": True}
        for name, words in _WORDS.items():
            assert all(word in rank["refusals"][name] for word in words), rank["refusals"][name]


_WORDS = {
    "lost ties": ("model.embed_tokens.weight and lm_head.weight", "tie_weights()", "move_model_to_device()"),
    "optimizer and move": ("AdamW", "Make the optimizer after move_model_to_device()"),
    "optimizer and to": ("AdamW", "Make the optimizer after move_model_to_device()"),
    "after a step": ("refresh()",),
    "no device": ("no device 'xla:1'", "'xla:0'"),
    "deferred": ("deferred_init must be called outside",),
}
