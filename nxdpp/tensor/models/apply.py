"""Application of a plan to a model: first all checks, then all changes."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.ground.torch_names import PARAMETERS
from nxdpp.ranks import parallel_state
from nxdpp.tensor.models import modules as parallel
from nxdpp.tensor.models.heads import check_heads, padded_sizes
from nxdpp.tensor.models.hooks import install
from nxdpp.tensor.models.own_plans import COUNTS_OF_HEADS
from nxdpp.tensor.models.parameters import Parts
from nxdpp.tensor.models.plan import EMBEDDING, LINEAR, MODULE, PARAMETER, expanded
from nxdpp.tensor.models.shared_inputs import share_inputs

_VOCABULARY = {"embedding_rowwise", "colwise_gather_output", "colwise_rep"}


def apply_plan(model: nn.Module, plan: Mapping[str, str], pad_heads: bool = False) -> list[str]:
    """Divide ``model`` by ``plan``; return sentences about what stays whole.

    ``pad_heads`` adds heads of zeros where they do not divide.

    Raises ``ValueError`` for sizes that do not divide and for modules that a style does not fit, before any change.
    """
    styles, of_parameters, _ = expanded(plan, model)
    found = dict(model.named_modules())
    # Experts over ranks are whole on each tensor-parallel rank, which all compute the same.
    experts = tuple(
        f"{name}." for name, each in found.items() if any(map(is_of_experts, each.parameters(recurse=False)))
    )
    of_parameters = {name: style for name, style in of_parameters.items() if not name.startswith(experts)}
    chosen = {n: style for n, style in styles.items() if n in found and not f"{n}.".startswith(experts)}
    _add_tied(model, found, chosen)
    told = list(_leave_out_vocabulary(found, chosen))
    padded = padded_sizes(found, chosen) if pad_heads else {}
    for name, style in chosen.items():
        _check_module(name, found[name], style, name in padded)
    for name, style in of_parameters.items():
        _check_parameter(model, name, style)
    check_heads(found, {name: style for name, style in chosen.items() if name not in padded})
    _check_ties(model, found, chosen)

    parts = Parts()
    for name, style in of_parameters.items():
        owner, _, key = name.rpartition(".")
        dim, stride = _along(PARAMETERS.of(found[owner])[key], style)
        if dim is not None:
            parts.divide(found[owner], key, dim, stride)
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    rope_size = getattr(config, "qk_rope_head_dim", None)
    for name, style in chosen.items():
        if style in MODULE:
            install(found[name], style, rope_size)
        else:
            _divide_module(found[name], style, parts, padded.get(name, 0))
    parts.replace_tied(model)
    share_inputs(found, chosen)
    for module in {found[name.rpartition(".")[0]] for name, style in chosen.items() if style in LINEAR}:
        for attribute in COUNTS_OF_HEADS.get(type(module).__name__, ()):
            size = parallel_state.get_tensor_model_parallel_size()
            setattr(module, attribute, getattr(module, attribute) // size)
    return told


def _add_tied(model: nn.Module, found: Mapping[str, nn.Module], chosen: dict[str, str]) -> None:
    """Choose modules with the weight of a chosen vocabulary too."""
    holders: dict[int, list[str]] = {}
    for name, module in found.items():
        weight = PARAMETERS.of(module).get("weight")
        if weight is not None and isinstance(module, nn.Linear | nn.Embedding):
            holders.setdefault(id(weight), []).append(name)
    for names in holders.values():
        if len(names) > 1 and any(chosen.get(name) in _VOCABULARY for name in names):
            for name in names:
                is_embedding = isinstance(found[name], nn.Embedding)
                chosen[name] = "embedding_rowwise" if is_embedding else "colwise_gather_output"


def _check_ties(model: nn.Module, found: Mapping[str, nn.Module], chosen: Mapping[str, str]) -> None:
    """Raise ``ValueError`` for a divided parameter that a module outside of the plan has too.

    Only a bias may be a parameter of the module around the head too, as in BERT.
    """
    divided = {name for name, style in chosen.items() if style not in MODULE}
    held = {
        id(parameter): name
        for name in divided
        for key, parameter in PARAMETERS.of(found[name]).items()
        if parameter is not None and (key == "weight" or "rowwise" not in chosen[name])
    }
    for name, module in found.items():
        for key, parameter in PARAMETERS.of(module).items():
            if id(parameter) not in held or name in divided:
                continue
            if not (key == "bias" and held[id(parameter)].startswith(f"{name}.")):
                raise ValueError(
                    f"{held[id(parameter)]} is divided, and {name}, a {type(module).__name__}, has the same {key}: "
                    f"give a plan for both, or for neither"
                )


def _leave_out_vocabulary(found: Mapping[str, nn.Module], chosen: dict[str, str]) -> Iterator[str]:
    """Leave embeddings whole whose vocabulary does not divide, and heads of that vocabulary."""
    size = parallel_state.get_tensor_model_parallel_size()
    for name, style in list(chosen.items()):
        module = found[name]
        if style not in _VOCABULARY or not isinstance(module, nn.Linear | nn.Embedding):
            continue
        rows = module.weight.shape[0]
        if rows % size:
            del chosen[name]
            yield (
                f"{name} stays whole on each rank: its {rows} rows do not divide by the tensor-parallel size {size}. "
                f"Another size makes parts of it, or model.resize_token_embeddings({rows + -rows % size}) before "
                f"tensor_parallelize, if this is the model's vocabulary; the new tokens count in the loss."
            )


def _check_module(name: str, module: nn.Module, style: str, is_padded: bool) -> None:
    if style in MODULE and style != "rows":
        return
    fits = style in EMBEDDING if isinstance(module, nn.Embedding) else style in LINEAR or style == "rows"
    if not isinstance(module, nn.Linear | nn.Embedding | Conv1D) or not fits:
        raise ValueError(f"the plan gives {name}, a {type(module).__name__}, the style {style}, which does not fit it")
    if isinstance(module, nn.Embedding):
        if module.max_norm or module.scale_grad_by_freq or module.sparse:
            raise ValueError(f"{name} has max_norm, scale_grad_by_freq or sparse, which a part of it cannot have")
    elif type(module).forward not in (nn.Linear.forward, Conv1D.forward):
        raise ValueError(
            f"{name} is a {type(module).__name__} with a forward of its own, which may not work on a part: leave it "
            f"out of the plan"
        )
    if is_padded or style == "rows":
        return
    dim, stride = _of_weight(module, style)
    _check_size(f"{name}.weight", tuple(module.weight.shape), dim, stride)


def _check_parameter(model: nn.Module, name: str, style: str) -> None:
    if style not in PARAMETER:
        raise ValueError(f"the plan gives the parameter {name} the style {style}, which is one of modules")
    parameter = model.get_parameter(name)
    owner, _, key = name.rpartition(".")
    if key == "gate_up_proj" and style == "colwise" and getattr(model.get_submodule(owner), "is_concatenated", False):
        raise ValueError(f"{name} has gate and up as blocks of one tensor: give it the style packed_colwise")
    dim, stride = _along(parameter, style)
    if dim is not None:
        _check_size(name, tuple(parameter.shape), dim, stride)


def _check_size(name: str, shape: tuple[int, ...], dim: int, stride: int) -> None:
    size = parallel_state.get_tensor_model_parallel_size()
    if shape[dim] % (size * stride):
        blocks = "" if stride == 1 else f" in {stride} blocks"
        raise ValueError(
            f"{name} of shape {shape} has {shape[dim]} rows or columns to divide{blocks} over {size} tensor-parallel "
            f"ranks: the number must be a multiple of {size * stride}. Use another tensor-parallel size."
        )


def _divide_module(module: Any, style: str, parts: Parts, padded: int) -> None:
    dim, stride = _of_weight(module, style)
    if isinstance(module, nn.Embedding):
        if style == "embedding_rowwise":
            parallel.to_vocabulary(module)
        elif style == "embedding_colwise":
            parallel.become(module, parallel.HiddenEmbedding)
        # The hidden size of embedding_heads is the heads of an attention, and is divided with them.
    elif isinstance(module, Conv1D):
        parallel.become(module, parallel.RowConv1D if style == "rowwise" else parallel.ColumnConv1D)
    elif "rowwise" in style:
        kind = parallel.RowLinearOfOwnOutputs if style == "rowwise_own_outputs" else parallel.RowLinear
        parallel.become_linear(module, kind, 1, input_is_parallel=style in ("rowwise", "rowwise_own_outputs"))
    else:
        parallel.become_linear(module, parallel.ColumnLinear, 0, stride, gather_output=style in _VOCABULARY)
    parts.divide(module, "weight", dim, stride, padded)
    if "rowwise" not in style and not isinstance(module, nn.Embedding):
        parts.divide(module, "bias", 0, stride, padded)


def _of_weight(module: nn.Module, style: str) -> tuple[int, int]:
    """Dimension along which the weight is divided, and its number of blocks."""
    if isinstance(module, nn.Embedding):
        return int(style != "embedding_rowwise"), 1
    is_row = "rowwise" in style
    stride = 2 if style == "packed_colwise" else 1
    if isinstance(module, Conv1D):
        # The weight is transposed; the blocks are query, key and value, or only key and value.
        rows, columns = module.weight.shape
        return int(not is_row), columns // rows if style == "packed_colwise" else 1
    return int(is_row), stride


def _along(parameter: Any, style: str) -> tuple[int | None, int]:
    """Dimension and number of blocks of a parameter that the plan names itself; None for one that stays whole."""
    if parameter is None or style == "replicate" or ("rowwise" in style and parameter.dim() == 1):
        return None, 1
    stride = 2 if style.startswith("packed") else 1
    if "rowwise" in style:
        return parameter.dim() - 1, stride
    return max(0, parameter.dim() - 2), stride
