"""Arguments of ``generate`` that a pipeline cannot honour, and the comparison of arguments between ranks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin

from nxdpp.agreement.fingerprint import digest
from nxdpp.agreement.input_hash import hash_of
from nxdpp.generation.absent import leaves_in
from nxdpp.generation.batches import GeneratedBatch, has_tensors, is_list, setting
from nxdpp.generation.caches import NAMES
from nxdpp.generation.turns import random_states
from nxdpp.ranks import parallel_state
from nxdpp.ranks.exchange import Exchange
from nxdpp.ranks.faults import failure_watch
from nxdpp.tracing.modules import listings

_REFUSED = {
    **dict.fromkeys(NAMES, "caches stay on the ranks of their stages. Leave it out, and give all tokens"),
    "inputs_embeds": "embeddings were not compared with one process. Give tokens",
    "decoder_inputs_embeds": "embeddings were not compared with one process. Give tokens",
    "encoder_outputs": "the encoder runs on its stages. Give the encoder's inputs",
    "assistant_model": "its tokens would be verified a batch at a time. Leave it out",
    "trust_remote_code": "such code was not compared with one process. Leave it out",
    "custom_generate": "it may call parts of the model that other ranks run. Leave it out",
}
_CACHES = (None, "dynamic", "static", "sliding_window", "hybrid")
# Settings, of the arguments, a config or the model: which values are refused, and why.
_SETTINGS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "output_attentions": (bool, "attentions stay on the ranks of their layers"),
    "output_hidden_states": (bool, "hidden states stay on the ranks of their layers"),
    "assistant_early_exit": (bool, "its tokens would come of some of the layers"),
    "prompt_lookup_num_tokens": (bool, "its tokens would be verified a batch at a time"),
    "use_mtp": (bool, "its tokens would be verified a batch at a time"),
    "compile_config": (bool, "a compiled forward would not run the other ranks"),
    "guidance_scale": (
        lambda scale: scale not in (None, 1),
        "it runs the model a second time for each token, with a cache that other ranks do not know",
    ),
    "cache_implementation": (lambda kind: kind not in _CACHES, "'dynamic' and 'static' caches are kept"),
}
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_OF_ROWS = ("prefix_allowed_tokens_fn", "logits_processor", "stopping_criteria")
_PLAIN = (bool, int, float, str, type(None))


class AgreedStart(NamedTuple):
    """Facts that all ranks agree on before they generate."""

    has_streamer: bool
    has_equal_random_state: bool
    dtypes: str


def is_generating(root: nn.Module) -> bool:
    """Return whether ``root`` generates as transformers does, or adapts a model that does."""
    return isinstance(root, GenerationMixin) or hasattr(root, "peft_config")


def generating_path(root: nn.Module) -> str:
    """Return the name of the model in ``root`` that generates: ``root`` itself, or the base of a ``PeftModel``.

    Raises ``TypeError`` for a module without one.
    """
    if isinstance(root, GenerationMixin):
        return ""
    adapters = getattr(root, "peft_config", {})
    if not any(getattr(each, "is_prompt_learning", False) for each in dict(adapters).values()):
        for name, module in listings.named_modules(root) if adapters else ():
            if isinstance(module, GenerationMixin):
                return name
    raise TypeError(
        f"generate needs a model of transformers that generates, such as one of AutoModelForCausalLM, or LoRA on it, "
        f"or a class with a generate of its own; this is a {type(root).__name__}."
    )


def check_arguments(module: nn.Module, inputs: Any, parts: int, arguments: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` or ``TypeError`` for what ``generate`` of ``module`` over a pipeline cannot honour."""
    _check_given(arguments)
    if any(getattr(each, "sequence_parallel_enabled", False) for each in listings.modules(module)):
        raise ValueError(
            "generate cannot honour sequence_parallel=True, which divides the tokens of a row over the tensor-parallel "
            "ranks: a forward has one new token. Save the model, and generate without sequence_parallel."
        )
    if getattr(getattr(module, "config", None), "model_type", None) == "fsmt":
        raise ValueError(
            "generate over a pipeline takes layers of hidden states (B, T, H), and fsmt has (T, B, H): save the model, "
            "and generate in one process."
        )
    for name, (is_refused, reason) in _SETTINGS.items():
        if is_refused(value := setting(module, arguments, name)):
            raise ValueError(f"generate over a pipeline cannot honour {name}={value!r}: {reason}. Leave it out.")
    chunk, cache = (setting(module, arguments, name) for name in ("prefill_chunk_size", "cache_implementation"))
    if chunk is not None and cache not in (None, "dynamic"):
        raise ValueError(
            f"generate over a pipeline cannot honour prefill_chunk_size={chunk} with a {cache!r} cache, which would "
            f"hold memory for all layers. Leave one of them out."
        )
    _check_batches(module, inputs, parts, arguments)
    for batch in inputs if is_list(inputs) else ():
        _check_given(batch)
        others = [key for key, value in batch.items() if not has_tensors(value)]
        if others:
            raise ValueError(
                f"a dict of a list of batches has tensors only: give {others[0]} to generate itself, for all batches."
            )
    check_dropout(module)


def check_dropout(module: nn.Module) -> None:
    """Raise ``ValueError`` for a module that drops values in training mode."""
    for name, each in listings.named_modules(module) if module.training else ():
        drops = isinstance(each, _DROPOUT) and each.p > 0
        rates = (rate for key, rate in vars(each).items() if "drop" in key and isinstance(rate, float))
        if each.training and (drops or any(rate > 0 for rate in rates)):
            raise ValueError(
                f"generate over a pipeline cannot honour the dropout of {name} in training mode, whose random numbers "
                f"would differ from one process: call model.eval() first."
            )


def _check_given(given: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for arguments, of all batches or of one, that a pipeline cannot honour with any value."""
    for name, reason in _REFUSED.items():
        if given.get(name) is not None:
            raise ValueError(f"generate over a pipeline cannot honour {name}: {reason}.")


def _check_batches(module: nn.Module, inputs: Any, parts: int, arguments: Mapping[str, Any]) -> None:
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise ValueError(f"num_microbatches={parts!r} must be a whole number of at least 1.")
    if is_list(inputs):
        if not inputs or not all(isinstance(each, Mapping) for each in inputs):
            raise TypeError("a list of batches has a dict of inputs for each, such as {'input_ids': ids}.")
        if parts > 1:
            raise ValueError("num_microbatches splits one batch: leave it out for a list of batches.")
    if parts == 1:
        return
    for name in _OF_ROWS:
        if arguments.get(name):
            raise ValueError(
                f"generate cannot honour {name} with num_microbatches={parts}: it would be called for each part, with "
                f"rows counted from 0. Leave out num_microbatches, or give a list of batches."
            )
    if setting(module, arguments, "return_dict_in_generate"):
        raise ValueError(
            "num_microbatches returns tokens: leave out return_dict_in_generate, or give a list of batches."
        )
    tensors = {name: value for name, value in {"inputs": inputs, **arguments}.items() if has_tensors(value)}
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor) or (value.is_floating_point() and "mask" not in name):
            raise ValueError(
                f"num_microbatches={parts} splits the rows of tokens and masks, and a row may have any number of "
                f"images ({name}): give a list of batches."
            )
    rows = {len(value) for value in tensors.values() if value.dim()}
    if len(rows) != 1 or next(iter(rows)) % parts or len(rows) == 0:
        raise ValueError(
            f"num_microbatches={parts} splits the rows of a batch into equal parts; the inputs "
            f"{', '.join(tensors)} have {sorted(rows)} rows."
        )


def check_same(
    batches: Sequence[GeneratedBatch], arguments: Mapping[str, Any], root: nn.Module, device: torch.device
) -> AgreedStart:
    """Compare the arguments of the ranks of this replica, and the states of their models; collective over them.

    Raises ``ValueError`` on all of them for inputs or settings that differ, and for a streamer of several batches.
    """
    inputs = [
        hash_of(leaf) for batch in batches for leaf in leaves_in(batch.arguments) if isinstance(leaf, torch.Tensor)
    ]
    own = (
        [int(each) for each in inputs],
        digest(repr([_settings(arguments), _state(root, device)]).encode()).hex(),
        [digest(state.numpy().tobytes()).hex() for state in random_states(device)],
        arguments.get("streamer") is not None,
        sorted({str(each.dtype) for each in root.parameters() if not each.is_meta}),
    )
    with failure_watch.reported():
        groups = parallel_state.get_pipeline_control_group(), parallel_state.get_tensor_control_group()
        everyones = Exchange(*groups).gather(own)
    for number, what in enumerate(("tokens or other inputs", "settings")):
        if any(each[number] != own[number] for each in everyones):
            raise ValueError(
                f"the ranks of a pipeline call generate with different {what}: give all of them the same. A DataLoader "
                f"with shuffle=True needs generator=torch.Generator().manual_seed(seed)."
            )
    has_streamer = any(each[3] for each in everyones)
    if has_streamer and len(batches) > 1:
        raise ValueError("a streamer shows one batch: generate without a list of batches and num_microbatches.")
    dtypes = str([*(each[4] for each in everyones), _autocast_dtype(device)])
    return AgreedStart(has_streamer, all(each[2] == own[2] for each in everyones), dtypes)


def _state(root: nn.Module, device: torch.device) -> list[str]:
    """Return all that a forward of ``root`` depends on besides its arguments: its mode, its adapters and autocast."""
    # Models of transformers have methods of these names.
    adapters = {
        str([each.active_adapters, each.disable_adapters])
        for each in listings.modules(root)
        if isinstance(getattr(each, "disable_adapters", None), bool)
    }
    return [str(root.training), _autocast_dtype(device), *sorted(adapters)]


def _autocast_dtype(device: torch.device) -> str:
    kind = device.type
    return str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "none"


def _settings(arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
    plain = {
        name: value.to_dict() if isinstance(value, GenerationConfig) else value
        for name, value in arguments.items()
        if value is not None
        if isinstance(value, GenerationConfig) or all(isinstance(leaf, _PLAIN) for leaf in leaves_in(value))
    }
    return sorted(plain.items())
