"""Configurations of the transformers models in a module, as lines that ranks compare.

The graph of a model shows only some fields: an epsilon or a dropout rate of a layer is in no graph.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from nxdpp.agreement.fingerprint import canonical
from nxdpp.agreement.plain_attributes import OF_A_RANK
from nxdpp.tracing.models.transformers_models import transformers_models

# Fields that tell where a model comes from, or name its outputs. Dtypes are compared with the parameters.
_DESCRIPTIVE = frozenset(
    {
        "architectures",
        "auto_class",
        "auto_map",
        "commit_hash",
        "dtype",
        "finetuning_task",
        "id2label",
        "label2id",
        "name_or_path",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
    }
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
