"""Plain attributes that the code of the user's modules reads, as a rank has them when it wraps the model.

So are the fields of transformers' configurations: an epsilon or a dropout rate of a layer is in no graph.

A layer runs on one rank. ``layer.scale = 1.0 + rank`` so trains a different model than one process, and no graph shows
it. Each rank has the whole model until it is cut, and so has all of these attributes.
"""

from collections.abc import Iterable, Iterator, Mapping
from inspect import unwrap
from types import FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from nxdpp.agreement.fingerprint import canonical
from nxdpp.tracing.code.names import is_framework, loaded_names, parts_of
from nxdpp.tracing.models.transformers_models import transformers_models
from nxdpp.tracing.modules import listings

# Attributes that ranks may have different values of: they name a rank or a device, or seed a generator of its own.
OF_A_RANK = ("rank", "device", "seed")
# Fields that tell where a model comes from, or name its outputs. Dtypes are compared with the parameters.
_DESCRIPTIVE = {
    "architectures", "auto_class", "auto_map", "commit_hash", "dtype", "finetuning_task", "id2label", "label2id",
    "name_or_path", "tokenizer_class", "torch_dtype", "transformers_version",
}  # fmt: skip
_MOST = 4096
_LONGEST = 100
_SHOWN = 4
_KINDS = (int, float, str, bool, type(None))


def plain_attributes(root: nn.Module) -> dict[str, str]:
    """Return the numbers, texts, booleans and ``None`` that modules hold and code of their classes loads, by path.

    Modules of torch, transformers and nxdpp are left out. So are attributes with "rank", "device" or "seed" in their
    name. There are at most 4096 values; each is a text of at most 100 characters.
    """
    modules = {
        name: module for name, module in listings.named_modules(root) if not is_framework(type(module).__module__)
    }
    if not modules:
        return {}
    read = _names_read({type(module): None for module in modules.values()})
    found: dict[str, str] = {}
    for name, module in modules.items():
        for key in sorted(vars(module).keys() & read - {"training"}):
            value = vars(module)[key]
            if type(value) in _KINDS and not any(word in key.lower() for word in OF_A_RANK):
                found[f"{name}.{key}" if name else key] = repr(value)[:_LONGEST]
                if len(found) == _MOST:
                    return found
    return found


def _names_read(kinds: Iterable[type]) -> set[str]:
    """Names that ``forward`` of the classes loads, and the methods and functions of these names."""
    methods: dict[str, list[FunctionType]] = {}
    for base in dict.fromkeys(base for kind in kinds for base in kind.__mro__ if not is_framework(base.__module__)):
        for name, item in vars(base).items():
            methods.setdefault(name, []).extend(_functions(item))
    names: set[str] = set()
    seen: set[FunctionType] = set()
    pending = [*methods.get("forward", ()), *methods.get("__call__", ())]
    while pending:
        function = pending.pop()
        if function in seen or is_framework(function.__module__):
            continue
        seen.add(function)
        loaded = loaded_names(function.__code__)
        for name in loaded:
            pending += [*methods.get(name, ()), *_functions(function.__globals__.get(name))]
        names |= loaded
    return names


def _functions(item: Any) -> list[FunctionType]:
    """The Python functions of a function, method, property or the like."""
    parts = (item,) if isinstance(item, FunctionType) else parts_of(item) or ()
    return [unwrap(part) for part in parts if isinstance(part, FunctionType)]


def check_same_attributes(there: str, theirs: Mapping[str, str], here: str, ours: Mapping[str, str]) -> None:
    """Raise ``RuntimeError`` if two ranks, which ``there`` and ``here`` name, have different attributes."""
    if theirs == ours:
        return
    names = [name for name in dict.fromkeys([*theirs, *ours]) if theirs.get(name) != ours.get(name)]
    lines = "".join(
        f"  {there}: {name} = {theirs.get(name, '(none)')}\n  {here}: {name} = {ours.get(name, '(none)')}\n"
        for name in names[:_SHOWN]
    )
    raise RuntimeError(
        f"{there} and {here} have wrapped models with different attributes, which forward reads: {len(names)} differ.\n"
        f"{lines}A layer runs on one rank alone, with that rank's value. Give all ranks the same value. An attribute "
        f"that is meant to differ and decides nothing that is trained, such as verbose = rank == 0, needs 'rank' in "
        f"its name, such as rank_is_verbose; or make it a property."
    )


def configuration_lines(module: nn.Module) -> list[str]:
    """Return a line for each field of the configurations of ``module``'s transformers models: ``name: value``.

    Fields that describe the origin of a model are left out, and fields with "rank", "device" or "seed" in their name.
    """
    lines = []
    for name, model in transformers_models(module).items():
        fields = {"class of the model": type(model), **dict(_fields(vars(model.config)))}
        prefix = f"{name}." if name else ""
        lines += [f"configuration {prefix}{field}: {canonical(value)}" for field, value in fields.items()]
    return lines


def _fields(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(values.items(), key=lambda item: str(item[0])):
        plain = str(name).removesuffix("_internal").strip("_")
        if plain in _DESCRIPTIVE or any(word in plain.lower() for word in OF_A_RANK):
            continue
        inner = vars(value) if isinstance(value, PreTrainedConfig) else value
        if isinstance(inner, Mapping) and inner:
            yield from ((f"{plain}.{field}", item) for field, item in _fields(inner))
        else:
            yield plain, value
