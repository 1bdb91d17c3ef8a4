"""The content of a document, checked before a load uses it: the parts that a save writes, and their types."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_OF_GROUP = ("options", "names")
_NOT_OPTIONS = ("params", "param_names")


def check_content(content: Any, tensors: Mapping[str, TensorStorageMetadata]) -> None:
    """Raise ``ValueError`` for content that no save writes.

    Args:
        content: JSON of the document.
        tensors: of the document by name.
    """
    _need(_has(content, "layout", "ties", "configuration", "optimizer", "random"), "content")
    _need(_has(content, "scheduler", "grad_scaler", "user_content"), "content")
    # A conversion has no layout, and no random states.
    layout = {"ranks": 0} if content["layout"] is None else content["layout"]
    _need(_are(layout, lambda value: type(value) is int), "layout")
    for key in ("ties", "configuration"):
        _need(content[key] is None or _are(content[key], lambda value: isinstance(value, str)), key)
    for key in ("scheduler", "grad_scaler"):
        _need(content[key] is None or isinstance(content[key], dict), key)
    _need(isinstance(content["random"], list) and len(content["random"]) == layout.get("ranks"), "random")
    if content["optimizer"] is not None:
        _check_optimizer(content["optimizer"], tensors)


def _check_optimizer(optimizer: Any, tensors: Mapping[str, TensorStorageMetadata]) -> None:
    _need(_has(optimizer, "class", "groups", "states") and isinstance(optimizer["class"], str), "optimizer")
    _need(isinstance(optimizer["groups"], list), "groups")
    for group in optimizer["groups"]:
        is_group = isinstance(group, dict) and tuple(group) == _OF_GROUP and isinstance(group["options"], dict)
        _need(is_group and not set(group["options"]) & set(_NOT_OPTIONS), "groups")
        _need(isinstance(group["names"], list) and all(isinstance(name, str) for name in group["names"]), "groups")
    _need(_are(optimizer["states"], lambda state: _are(state, lambda value: isinstance(value, dict))), "states")
    for name, state in optimizer["states"].items():
        for key, described in state.items():
            if "tensor" not in described:
                number = described.get("number", ())
                _need(isinstance(number, int | float | None) or number in ("nan", "inf", "-inf"), "states")
                continue
            saved = tensors.get(f"optimizer.{name}.{key}")
            _need(saved is not None and described["tensor"] == str(saved.properties.dtype).removeprefix("torch."), key)
            _need(saved is not None and described.get("shape") in (None, list(saved.size)), key)


def _has(value: Any, *keys: str) -> bool:
    return isinstance(value, dict) and all(key in value for key in keys)


def _are(value: Any, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(check, value.values()))


def _need(is_right: bool, part: str) -> None:
    if not is_right:
        raise ValueError(f"its part {part!r} is not as a save writes it")
