"""``save_pretrained``, ``state_dict`` and pickles of a model of which one rank holds a part."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

from torch import nn

from nxdpp.tracing.modules.listings import modules

# Arguments of transformers' save_pretrained that nxdpp.save_pretrained follows.
_SAVE = {
    "distributed_checkpoint": False,
    "max_shard_size": "50GB",
    "push_to_hub": False,
    "safe_serialization": True,
    "save_original_format": True,
    "save_peft_format": True,
    "state_dict": None,
    "token": None,
    "variant": None,
}
_are_names_wanted = ContextVar("a state dict is read for its names", default=False)


def refuse_own_save(root: nn.Module) -> None:
    """Make the ``save_pretrained`` of ``root``, and of the models in it, raise ``RuntimeError``."""
    for module in modules(root):
        if callable(getattr(type(module), "save_pretrained", None)):
            vars(module)["save_pretrained"] = _refuse


def refuse_own_state(module: nn.Module, key: str) -> None:
    """Make state dicts with ``module``, of whose tensors another rank holds ``key``, raise ``RuntimeError``."""
    module.register_state_dict_pre_hook(partial(_refuse_state, key))


@contextmanager
def naming() -> Iterator[None]:
    """Allow state dicts with tensors of other ranks, on the meta device, for a reader of their names."""
    token = _are_names_wanted.set(True)
    try:
        yield
    finally:
        _are_names_wanted.reset(token)


def state_of_all_names(root: nn.Module) -> dict[str, Any]:
    """The state dict of ``root``, with tensors of other ranks on the meta device."""
    with naming():
        state: dict[str, Any] = root.state_dict(keep_vars=True)
    return state


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "this model's own save_pretrained would need the parameters of all stages, and this rank holds those of its "
        "own: call nxdpp.save_pretrained(model, directory) on every rank."
    )


def refuse_pickle(name: str) -> NoReturn:
    """Raise ``RuntimeError`` for a pickle with the tensor ``name``, which another rank holds."""
    raise RuntimeError(_without_values(name, "a pickle (torch.save) of it or of its module"))


def _refuse_state(key: str, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not _are_names_wanted.get():
        raise RuntimeError(_without_values(prefix + key, "a state dict of the module inside a pipeline"))


def _without_values(name: str, what: str) -> str:
    return (
        f"another rank holds {name}, and {what} would have no values of it. With model = NxDPPModel(module, ...), "
        f"model.local_state_dict() has this rank's part. On every rank, nxdpp.gather_state_dict(model) returns the "
        f"whole on rank 0, and nxdpp.save_checkpoint and nxdpp.save_pretrained write it."
    )


def save_directory_of(
    model: Any, directory: str | os.PathLike[str], positional: Sequence[Any], arguments: Mapping[str, Any]
) -> None:
    """Call ``nxdpp.save_pretrained(model, directory)``. Raises ``ValueError`` for arguments of another save."""
    if positional:
        raise ValueError(
            f"save_pretrained of a pipelined model takes the directory and is_main_process by position, and was given "
            f"{len(positional)} more: {', '.join(type(value).__name__ for value in positional)}. Leave them out: it "
            f"writes the weights of all ranks."
        )
    others = [name for name, value in arguments.items() if name not in _SAVE or value != _SAVE[name]]
    if others:
        raise ValueError(
            f"save_pretrained of a pipelined model writes the weights of all ranks, in files of at most 1 GB, and has "
            f"no {', '.join(others)}. Leave it out. To push, upload the directory from one process afterwards."
        )
    from nxdpp.checkpoint.huggingface.save import save_pretrained

    save_pretrained(model, directory)
