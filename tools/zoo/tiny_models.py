"""The smallest model of every type of transformers' auto mappings with a head, with random weights."""

import dataclasses
import itertools

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tools.zoo.shrinking import shrink
from tools.zoo.special_cases import SPECIAL, SPECIAL_FOR_TASK
from tools.zoo.tasks import TASKS

LARGEST = 50_000_000
# Their heads look for the last token that is no padding.
_HEADS_WITH_PADDING = ("sequence-classification",)
# Their models of types with an encoder and a decoder have one of the two.
_ONE_STACK = ("causal-lm", "token-classification", "text-encoding", "audio-classification")


def types(task: str) -> list[str]:
    """The model types for ``task``, one of ``TASKS``, that transformers maps to a model, sorted by name.

    A model class that an earlier task has too is left out, except for a thorough task.
    """
    chosen = _classes(task)
    if TASKS[task].thorough:
        return sorted(chosen)
    earlier = itertools.takewhile(lambda name: name != task, TASKS)
    known = {name for other in earlier for name in _classes(other).values()}
    return sorted(model_type for model_type, name in chosen.items() if name not in known)


def _classes(task: str) -> dict[str, str]:
    """The class name of each type."""
    names = getattr(modeling_auto, TASKS[task].mapping + "_NAMES")
    return {model_type: name if isinstance(name, str) else name[0] for model_type, name in names.items()}


def configuration(task: str, model_type: str) -> PreTrainedConfig:
    """A small configuration: four layers, or two in the encoder and two in the decoder, without dropout."""
    config_class = CONFIG_MAPPING[model_type]
    special = SPECIAL.get(model_type, {}) | SPECIAL_FOR_TASK.get((task, model_type), {})
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    if task == "causal-lm" and "is_decoder" in fields:
        special = {"is_decoder": True} | special
    if (task == "seq2seq-lm" or config_class.is_encoder_decoder) and fields.get("decoder_start_token_id") is None:
        special = {"decoder_start_token_id": 0} | special
    if task in _HEADS_WITH_PADDING and fields.get("pad_token_id") is None and "pad_token_id" in fields:
        special = {"pad_token_id": 0} | special
    encodes_and_decodes = task not in _ONE_STACK and config_class.is_encoder_decoder
    return shrink(config_class, layers=_layers(task) if encodes_and_decodes else 4, special=special)


def _layers(task: str) -> int:
    return 2 if TASKS[task].thorough else 3  # enough where only the decoder's count


def build(task: str, model_type: str, device: str | None = None) -> PreTrainedModel:
    """The model of ``model_type`` for ``task``, in float32 and training mode, with the same weights at each call.

    If transformers has several models for a type (``deit``), the first is built. ``device="meta"`` allocates nothing.

    Raises ``ValueError`` for more than ``LARGEST`` parameters, before they are allocated.
    """
    model_class = _model_class(task, model_type)
    with torch.device("meta"):
        model = model_class(_own_configuration(task, model_type, model_class))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > LARGEST:
        raise ValueError(f"{model_type} would have {parameters:,} parameters; at most {LARGEST:,} are built.")
    if device != "meta":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = model_class(_own_configuration(task, model_type, model_class))
    torch.nn.Module.to(
        model, device or torch.empty(0).device
    )  # to "meta" too: some models make a few parameters on the CPU
    model.train()
    return model


def _model_class(task: str, model_type: str) -> type[PreTrainedModel]:
    known = getattr(modeling_auto, TASKS[task].mapping)[CONFIG_MAPPING[model_type]]
    model_class: type[PreTrainedModel] = known[0] if isinstance(known, tuple) else known
    return model_class


def _own_configuration(task: str, model_type: str, model_class: type[PreTrainedModel]) -> PreTrainedConfig:
    """The configuration that the class takes. Some types map to the model of one of their parts (``llama4``)."""
    config = configuration(task, model_type)
    wanted = model_class.config_class
    assert wanted is not None
    if isinstance(config, wanted):
        return config
    parts = (part for part in vars(config).values() if isinstance(part, wanted))
    return next(parts, config)  # ``internlm3`` has no model code
