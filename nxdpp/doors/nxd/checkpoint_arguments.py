"""Arguments of the functions of checkpoints, as one rank gives them."""

import os
import re
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.collective_call import given as kind_of
from nxdpp.checkpoint.distributed.directory import DOCUMENT, METADATA
from nxdpp.checkpoint.distributed.model_state import local_module_of
from nxdpp.checkpoint.distributed.remote_directory import check_address
from nxdpp.checkpoint.distributed.schedulers import NamedSchedulers
from nxdpp.doors.nxd.model import NxDModel
from nxdpp.doors.nxd.optimizer import NxDOptimizer
from nxdpp.tensor.rank_files import local_path

_FORMATS = ("nxdpp", "dcp")


def place_of(path: str | os.PathLike[str]) -> Path | str:
    """``path`` as a ``Path``, also of ``file:///``, or the address of a store.

    Raises ``TypeError``, and ``ValueError`` as ``local_path`` and ``check_address`` do.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise TypeError(f"path={path!r} must be a string or a Path.")
    text = os.fspath(path)
    if re.match(r"[\w+.:-]+:/.*:.*@", text):
        raise ValueError(
            "path has a user and a password, which messages would show: give them in the environment or in fsspec's "
            "configuration, and the address without them."
        )
    if text.startswith("file:///"):
        return local_path(text.removeprefix("file://"))
    scheme = re.match(r"([A-Za-z][\w+.-]+):/+", text)
    if not scheme:
        return local_path(path)
    address = f"{scheme[1]}://{text[scheme.end() :]}"
    check_address(address)
    if address != path:
        raise ValueError(f"path={text!r} is not the address of a store: give it as text, {address!r}.")
    return address.rstrip("/")


def tag_of(tag: str | int) -> str:
    """``tag`` as the name of a directory. Raises ``ValueError`` if it is not one."""
    name = cast(str, str(tag) if type(tag) is int else tag)
    directory.check_tag(name)
    return name


def remedy_without_checkpoint(path: Path | str) -> str:
    """The call for a ``path`` that is not the directory of a training's checkpoints."""
    if isinstance(path, str):
        return f"if it is one checkpoint itself, give its directory, and tag={path.rpartition('/')[2]!r}."
    if (path / DOCUMENT).is_file() or (path / METADATA).is_file():
        return f"it is one checkpoint itself. Give its directory and its tag: {str(path.parent)!r}, {path.name!r}."
    if any(path.glob("model*.safetensors*")):
        return f"it has a pretrained model. Call nxdpp.load_pretrained(model, {str(path)!r})."
    if any(path.glob("**/dp_rank_00_*tp_rank_00_pp_rank_00.pt")):
        return (
            "it has files of NeuronX Distributed's ranks. Convert them by python -m nxdpp.scripts.checkpoint_converter "
            "--convert_to_full_state, and load the file that it writes: nxdpp.parallel_layers.load(file, model=model, "
            "model_key=None, sharded=False)."
        )
    return f"has_checkpoint({str(path)!r}) tells it beforehand."


def model_of(model: Any) -> nn.Module | None:
    """The model that ``NxDModel`` wraps, or ``model``. Raises ``TypeError`` for a state dict and other objects."""
    if isinstance(model, NxDModel):
        return model.module
    if model is None or isinstance(model, nn.Module) or hasattr(model, "replace_local_tensors"):
        found: nn.Module | None = model
        return found
    raise TypeError(
        f"model is of class {type(model).__name__}: give the module itself. A checkpoint has whole tensors, and a "
        f"state dict does not tell which part of them it has."
    )


def optimizers_of(optimizer: Any) -> dict[str, Optimizer]:
    """The optimizers in ``optimizer`` by name: of a dict or a list of them, or one without a name; empty for ``None``.

    ``NxDOptimizer`` stands for what it wraps. Raises ``TypeError`` for other objects, and ``ValueError`` for names.
    """
    if optimizer is None:
        return {}
    given = _by_name(optimizer, "optimizer")
    if given is None:
        given = {"": optimizer}
    elif any(each in list(given.values())[:number] for number, each in enumerate(given.values())):
        raise ValueError("optimizer= has one optimizer twice: give each once.")
    found = {name: each.optimizer if isinstance(each, NxDOptimizer) else each for name, each in given.items()}
    others = [each for each in found.values() if not isinstance(each, Optimizer)]
    if others or not found:
        raise TypeError(
            f"optimizer is of class {type(optimizer).__name__}: give the optimizer itself, or a list of optimizers or "
            f"a dict of them by name. Its state has the names of its parameters, which a state dict does not have."
        )
    return found


def scheduler_of(scheduler: Any) -> Stateful | None:
    """``scheduler``, or several in a dict or a list as one. Raises ``TypeError`` and ``ValueError``."""
    named = _by_name(scheduler, "scheduler")
    if named is None:
        return cast("Stateful | None", scheduler)
    for name, each in named.items():
        _check_stateful(f"scheduler[{name!r}]", each)
    return NamedSchedulers(named)


def _by_name(given: Any, argument: str) -> dict[str, Any] | None:
    """The values of a dict or a list by name or place; ``None`` for any other object."""
    if isinstance(given, list | tuple):
        return {str(number): each for number, each in enumerate(given)}
    if type(given) is not dict:
        return None
    wrong = [name for name in given if not isinstance(name, str) or not name.isprintable() or not name]
    if wrong and all(hasattr(each, "state_dict") for each in given.values()):
        raise ValueError(f"{argument}= has the name {wrong[0]!r}: names are texts that can be printed.")
    return given


def is_of_inference(model: nn.Module | None) -> bool:
    """Return whether ``model`` has tensors that were made in inference mode."""
    if model is None:
        return False
    module = local_module_of(model)
    return any(tensor.is_inference() for tensor in (*module.parameters(), *module.buffers()))


def check_parts(model: Any, optimizer: Any, scheduler: Any, grad_scaler: Stateful | None) -> None:
    """Raise ``TypeError`` for objects of a wrong class, and ``ValueError`` for an optimizer without its model."""
    if optimizers_of(optimizer) and model_of(model) is None:
        raise ValueError("optimizer= needs model= too: the state of a parameter has the name that the model gives it.")
    model_of(model)
    for name, one in (("scheduler", scheduler_of(scheduler)), ("grad_scaler", grad_scaler)):
        if one is not None:
            _check_stateful(name, one)


def _check_stateful(name: str, one: Any) -> None:
    if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
        raise TypeError(f"{name} is a {type(one).__name__}, without state_dict and load_state_dict.")


def kinds_of(given: Any) -> str:
    """Text of an argument of which the classes are compared: one object, or several by name."""
    named = _by_name(given, "")
    if named is None:
        return kind_of(given)
    return f"{{{', '.join(f'{name!r}: {kind_of(each)}' for name, each in named.items())}}}"


def check_format(format: str, place: Path | str) -> None:
    """Raise ``ValueError`` for an unknown ``format``, and for files of torch's in a store at the address ``place``."""
    if format not in _FORMATS:
        raise ValueError(f"format={format!r} must be one of {', '.join(map(repr, _FORMATS))}.")
    if format == "dcp" and isinstance(place, str):
        raise ValueError(f"format='dcp' is for a file system, and {place} is the address of a store: leave it out.")


def check_kept(num_kept_ckpts: Any) -> None:
    """Raise ``ValueError`` for a number of checkpoints to keep that is not at least 1; ``None`` keeps all."""
    is_number = isinstance(num_kept_ckpts, int) and not isinstance(num_kept_ckpts, bool)
    if num_kept_ckpts is not None and not (is_number and num_kept_ckpts >= 1):
        raise ValueError(
            f"num_kept_ckpts={num_kept_ckpts!r} must be a whole number of at least 1, or None or -1 to keep all."
        )
