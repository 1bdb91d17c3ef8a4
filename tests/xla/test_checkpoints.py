"""Checkpoints and pretrained directories of XLA ranks: those of the CPU, byte for byte, and written without a graph."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import nxdpp
from nxdpp import NxDPPModel, parallel_layers, parallel_state
from nxdpp.devices.kinds import device_of
from tests.support.run_ranks import run_ranks
from tests.support.xla_ranks import compilations, run_xla_ranks
from tests.xla.models import batch, gpt2, layer_class, llama

Values = dict[str, torch.Tensor]


def _wrapped(model: nn.Module) -> NxDPPModel:
    return NxDPPModel(
        model, transformer_layer_cls=layer_class(model), num_microbatches=2, broadcast_and_average_loss=True
    )


def _trained(device: str | None, model: nn.Module) -> tuple[NxDPPModel, torch.optim.Optimizer]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, device=device)
    wrapped = _wrapped(model)
    wrapped.move_model_to_device()
    return wrapped, torch.optim.AdamW(list(wrapped.local_parameters()), lr=1e-2)


def _steps(model: NxDPPModel, optimizer: torch.optim.Optimizer, *numbers: int) -> list[float]:
    losses = []
    for number in numbers:
        loss = model.run_train(**batch(number))
        assert isinstance(loss, torch.Tensor)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _state(model: NxDPPModel, optimizer: torch.optim.Optimizer) -> Values:
    """Copies of all parameters, buffers and moments of this rank."""
    names = {id(parameter): name for name, parameter in model.local_named_parameters()}
    moments = {
        f"{names[id(parameter)]} {key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    return {
        name: torch.as_tensor(value).detach().cpu().clone()
        for name, value in {**model.local_state_dict(), **moments}.items()
    }


def _different(one: Values, other: Values) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


# A restart: four steps are two and two, with the dropout of the device.
def _restart(rank: int, folder: str) -> dict[str, Any]:
    model, optimizer = _trained("xla", gpt2())
    device = device_of(parallel_state.local_device())
    begin = device.random_state()
    uninterrupted = _steps(model, optimizer, 0, 1, 2, 3)
    whole = _state(model, optimizer)

    model, optimizer = _trained("xla", gpt2())
    device.set_random_state(begin)
    losses = _steps(model, optimizer, 0, 1)
    graphs: list[int] = []
    with compilations(graphs):
        # The state of the save is that of the call: the next step does not wait for the files.
        nxdpp.save_checkpoint(
            folder, "async", model, optimizer, user_content={"on": optimizer.param_groups[0]["lr"]}, async_save=True
        )
    losses += _steps(model, optimizer, 2, 3)
    with_save = _state(model, optimizer)
    with compilations(graphs):
        nxdpp.save_checkpoint(folder, "second", model, optimizer, async_save=True)
        nxdpp.finalize_checkpoint()
        nxdpp.save_checkpoint(folder, "third", model, optimizer)

    torch.manual_seed(7)
    model, optimizer = _trained("xla", type(model.original_module)(model.original_module.config))
    _steps(model, optimizer, 9)
    with compilations(graphs):
        content = nxdpp.load_checkpoint(folder, "async", model, optimizer)
    resumed = _steps(model, optimizer, 2, 3)
    return {
        "losses": (uninterrupted, losses, resumed),
        "a save changes": _different(whole, with_save),
        "a restart changes": _different(whole, _state(model, optimizer)),
        "graphs": graphs,
        "content": content,
    }


def test_a_restart_continues_bit_for_bit_with_dropout_and_saves_compile_nothing(tmp_path: Path) -> None:
    for rank in run_xla_ranks(2, _restart, str(tmp_path)):
        uninterrupted, with_save, resumed = rank["losses"]
        assert with_save == uninterrupted
        assert resumed == uninterrupted[2:]
        assert rank["a save changes"] == rank["a restart changes"] == []
        assert rank["graphs"] == [0, 0, 0]
        assert rank["content"] == {"on": 1e-2}


# Between devices and layouts.
def _on_xla_first(rank: int, folder: str) -> Values:
    model, optimizer = _trained("xla", llama(tie_word_embeddings=True))
    _steps(model, optimizer, 0, 1)
    content = {"of the device": torch.arange(3.0).to(parallel_state.local_device()) + 1}
    nxdpp.save_checkpoint(folder, "xla", model, optimizer, user_content=content)
    nxdpp.save_pretrained(model, f"{folder}/hf_xla")
    parallel_layers.save({"model": model.local_state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/pt")
    return _state(model, optimizer)


def _on_cpu(rank: int, folder: str) -> dict[str, Any]:
    model, optimizer = _trained(None, llama(tie_word_embeddings=True))
    content = nxdpp.load_checkpoint(folder, "xla", model, optimizer)
    loaded = _state(model, optimizer)
    nxdpp.save_pretrained(model, f"{folder}/hf_cpu")
    file = parallel_layers.load(f"{folder}/pt")
    devices = {value.device.type for value in file["model"].values()}
    of_file = dict(file["model"])
    _steps(model, optimizer, 2)
    nxdpp.save_checkpoint(folder, "cpu", model, optimizer)
    return {
        "loaded": loaded,
        "file": of_file,
        "devices": devices,
        "content": content,
        "stepped": _state(model, optimizer),
    }


def _on_one_cpu(rank: int, folder: str) -> Values:
    model = llama(tie_word_embeddings=True)
    optimizer = torch.optim.AdamW(model.parameters())
    nxdpp.load_checkpoint(folder, "xla", model, optimizer)
    return dict(model.state_dict())


def _back_on_xla(rank: int, folder: str) -> dict[str, Any]:
    model, optimizer = _trained("xla", llama(tie_word_embeddings=True))
    objects = {name: id(parameter) for name, parameter in model.local_named_parameters()}
    # Meta: the values come from the file, before the move.
    with nxdpp.init_on_device(torch.device("meta")):
        on_meta = llama(tie_word_embeddings=True)
    other = _wrapped(on_meta)
    nxdpp.load_pretrained(other, f"{folder}/hf_xla")
    other.move_model_to_device()
    nxdpp.load_pretrained(model, f"{folder}/hf_xla")
    pretrained = {name: value.detach().cpu() for name, value in model.local_state_dict().items()}
    of_meta = {name: value.detach().cpu() for name, value in other.local_state_dict().items()}

    parallel_layers.load(f"{folder}/pt", model, model_key="model")
    of_file = {name: value.detach().cpu() for name, value in model.local_state_dict().items()}
    nxdpp.load_checkpoint(folder, "cpu", model, optimizer)
    return {
        "state": _state(model, optimizer),
        "pretrained": pretrained,
        "of meta": of_meta,
        "of file": of_file,
        "same objects": {name: id(parameter) for name, parameter in model.local_named_parameters()} == objects,
        "devices": {tensor.device.type for tensor in (*model.local_module.parameters(), *model.local_module.buffers())},
        "loss": _steps(model, optimizer, 3),
    }


def test_checkpoints_pass_between_xla_and_cpu_ranks_bit_for_bit(tmp_path: Path) -> None:
    folder = str(tmp_path)
    saved = run_xla_ranks(2, _on_xla_first, folder)
    on_cpu = run_ranks(2, _on_cpu, folder)
    (whole,) = run_ranks(1, _on_one_cpu, folder)
    back = run_xla_ranks(2, _back_on_xla, folder)
    for xla, cpu, again in zip(saved, on_cpu, back, strict=True):
        weights = {name: xla[name] for name in cpu["file"]}
        assert _different(xla, cpu["loaded"]) == []
        assert cpu["devices"] == {"cpu"}
        assert _different(weights, cpu["file"]) == _different(weights, {name: whole[name] for name in weights}) == []
        assert cpu["content"]["of the device"].tolist() == [1.0, 2.0, 3.0]
        for key in ("pretrained", "of meta", "of file"):
            assert _different(weights, again[key]) == [], key
        assert _different(cpu["stepped"], again["state"]) == []
        assert again["same objects"]
        assert again["devices"] == {"xla"}
    assert len({rank["loss"][0] for rank in back}) == 1
    _check_equal_files(tmp_path / "hf_xla", tmp_path / "hf_cpu")


def _check_equal_files(one: Path, other: Path) -> None:
    files = sorted(path.name for path in one.iterdir())
    assert files == sorted(path.name for path in other.iterdir())
    assert any(name.endswith(".safetensors") for name in files)
    assert [name for name in files if (one / name).read_bytes() != (other / name).read_bytes()] == []
