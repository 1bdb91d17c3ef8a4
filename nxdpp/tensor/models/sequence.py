"""Sequence parallelism of the layers that a plan divides: each rank has a part of the sequence between the linear ones.

The modules above the layers, masks and positions have the whole sequence, and so do the layers' own linear layers. The
sequence is dimension 1 of ``(B, S, H)``::

    before the layers      (B, S, H)
    first layer, entry     (B, S / ranks, H)     scatter
      norm                 (B, S / ranks, H)     its gradients are summed once a step
      attention, entry     (B, S, H)             gather, once for query, key and value
      its row-parallel     (B, S / ranks, H)     reduce-scatter
      norm, feed-forward                         likewise
    last layer, exit       (B, S, H)             gather

Activations that a stage sends after its layers are parts as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nxdpp.ranks import parallel_state
from nxdpp.tensor import mappings
from nxdpp.tensor.layers import whole_input
from nxdpp.tensor.models.compared_types import COMPARED_SEQUENCES
from nxdpp.tensor.models.modules import ColumnLinear, RowLinear
from nxdpp.tensor.models.plan import expanded
from nxdpp.tensor.models.shared_inputs import Siblings
from nxdpp.tensor.overlapped_linear import SharedInput, WeightRows, is_trained
from nxdpp.tensor.tensor_attributes import mark_sequence_parallel

_DIM = 1
_COLUMN = {"colwise", "packed_colwise"}
_PER_HEAD = "replicated_with_grad_allreduce"


@dataclass
class DividedLayers:
    """Names of the modules of a model whose layers, in order, can have a part of the sequence.

    ``columns`` has the column-parallel layers of each attention and feed-forward, ``norms`` are between them and
    ``rows``.
    """

    layers: list[str] = field(default_factory=list)
    columns: dict[str, list[str]] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)


def check_layers(model: nn.Module, plan: Mapping[str, str]) -> DividedLayers:
    """Return the layers that ``plan`` divides. Raises ``ValueError`` for a layer with any other kind of module."""
    styles, of_parameters, _ = expanded(plan, model)
    lists = {_list_of(name): None for name in styles if _list_of(name)}
    if len(lists) != 1:
        raise ValueError(
            f"sequence_parallel=True needs one list of layers that the plan divides, and this one divides "
            f"{', '.join(lists) or 'none'}: leave it out"
        )
    found = dict(model.named_modules())
    (stack,) = lists
    divided = DividedLayers([f"{stack}.{key}" for key, _ in found[stack].named_children()])
    for layer in divided.layers:
        for name, module in found[layer].named_modules(prefix=layer):
            if next(module.parameters(recurse=False), None) is not None:
                _add(divided, layer, name, module, styles.get(name))
    for name in of_parameters:
        _refuse(name, "a parameter", "which the plan divides by itself")
    for owner in divided.columns:
        if not any(row.startswith(f"{owner}.") for row in divided.rows):
            _refuse(owner, f"a {type(found[owner]).__name__}", "which has no row-parallel layer")
    return divided


def check_type(model: nn.Module, plan: Mapping[str, str]) -> None:
    """Raise ``ValueError`` for a model whose type was not compared with one process."""
    check_layers(model, plan)
    if type(model).__name__ not in COMPARED_SEQUENCES:
        raise ValueError(
            f"sequence_parallel=True of {type(model).__name__} was not compared with one process "
            f"(docs/tensor_models.md lists the types). Leave it out, or give plan=model.tp_plan to use it unseen, and "
            f"compare loss and gradients yourself."
        )


def _add(divided: DividedLayers, layer: str, name: str, module: nn.Module, style: str | None) -> None:
    owner = name.rpartition(".")[0]
    if isinstance(module, nn.Linear) and style in _COLUMN and owner != layer:
        divided.columns.setdefault(owner, []).append(name)
    elif isinstance(module, nn.Linear) and style == "rowwise" and owner != layer:
        divided.rows.append(name)
    elif _is_norm(module) and owner == layer:
        divided.norms.append(name)
    elif not (_is_norm(module) and style == _PER_HEAD):
        what = f"a {type(module).__name__}" + (f" of the style {style}" if style else ", which the plan leaves whole")
        _refuse(name, what, "and only norms may be between its column-parallel and row-parallel layers")


def _refuse(name: str, what: str, why: str) -> None:
    raise ValueError(f"sequence_parallel=True cannot divide the sequence of {name}, {what}, {why}: leave it out")


def _is_norm(module: nn.Module) -> bool:
    """Return whether ``module`` is a norm over the last dimension."""
    name = type(module).__name__
    of_features = "RMSNorm" in name or "LayerNorm" in name
    return of_features and all(parameter.dim() == 1 for parameter in module.parameters(recurse=False))


def _list_of(name: str) -> str:
    """``model.layers`` of ``model.layers.0.mlp``; empty for a module that is in no list."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0]]) if numbers else ""


def divide_sequence(model: nn.Module, divided: DividedLayers) -> None:
    """Give the layers a part of the sequence; their linear layers are parallel already."""
    found: dict[str, Any] = dict(model.named_modules())
    for owner, names in divided.columns.items():
        columns = vars(found[owner])["divided_columns"] = DividedColumns([found[name] for name in names])
        for name in names:
            vars(found[name])["siblings"] = columns
        found[owner].register_forward_pre_hook(_gather_input, with_kwargs=True)
        found[owner].register_forward_hook(_forget_input, always_call=True)
    for name in divided.rows:
        row = found[name]
        assert isinstance(row, RowLinear)
        row.sequence_parallel_enabled = True
        if row.bias is not None:
            row.bias.sequence_parallel_enabled = True  # type: ignore[attr-defined]  # nxdpp's own attribute of a tensor
    for name in divided.norms:
        mark_sequence_parallel(found[name])
    found[divided.layers[0]].register_forward_pre_hook(_scatter_hidden_states, with_kwargs=True)
    found[divided.layers[-1]].register_forward_hook(_gather_output)


class DividedColumns(Siblings):
    """Column-parallel layers of one module, which is given a part of the sequence."""

    def __init__(self, layers: list[ColumnLinear]) -> None:
        super().__init__(layers)
        self._shared: SharedInput | None = None
        self._waiting: list[ColumnLinear] = []

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole sequence ``(B, S, H)`` of this rank's part ``(B, S / ranks, H)``."""
        parts = [WeightRows(layer.weight, layer.bias) for layer in self._layers]
        if not is_trained(part, parts):
            return whole_input(part, parts, _DIM)
        self._shared, self._waiting = SharedInput(part, parts, sequence_dimension=_DIM), list(self._layers)
        return self._shared.whole

    def forget(self) -> None:
        """Drop the nodes of the present call."""
        self._shared, self._waiting = None, []

    def product(self, layer: ColumnLinear, input_: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the product of ``layer``, ``(..., O / ranks)``.

        The gradient of the gathered sequence is summed where it was gathered.
        """
        shared = self._shared
        if shared is None or input_ is not shared.whole or layer not in self._waiting or not torch.is_grad_enabled():
            return functional.linear(input_, layer.weight, layer.bias)
        self._waiting.remove(layer)
        return shared.product(self._layers.index(layer))


def _gather_input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return _with_first(module, args, kwargs, module.divided_columns.gather)


def _forget_input(module: Any, args: Any, output: Any) -> None:
    module.divided_columns.forget()


def _scatter_hidden_states(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return _with_first(module, args, kwargs, _own_part)


def _own_part(whole: torch.Tensor) -> torch.Tensor:
    ranks = parallel_state.get_tensor_model_parallel_size()
    if whole.dim() != 3 or whole.shape[_DIM] % ranks:
        raise ValueError(
            f"tensor_parallelize(sequence_parallel=True) divides a sequence of {whole.shape[_DIM]} tokens, of hidden "
            f"states of shape {tuple(whole.shape)}, over {ranks} tensor-parallel ranks: pad it to a multiple of {ranks}"
        )
    return mappings.scatter_to_sequence_parallel_region(whole, _DIM)


def _gather_output(module: nn.Module, args: Any, output: Any) -> Any:
    """All ranks do the same with the output of the last layer."""
    if isinstance(output, tuple):
        return _whole(output[0]), *output[1:]
    return _whole(output)


def _whole(part: torch.Tensor) -> torch.Tensor:
    return mappings.gather_from_sequence_parallel_region(part, _DIM, to_model_parallel=False)


def _with_first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], function: Any) -> tuple[Any, Any]:
    """The arguments of a call of ``module`` with ``function`` of the hidden states."""
    if args:
        return (function(args[0]), *args[1:]), kwargs
    if "hidden_states" in kwargs:
        return args, kwargs | {"hidden_states": function(kwargs["hidden_states"])}
    raise RuntimeError(
        f"tensor_parallelize(sequence_parallel=True) found no hidden states among the arguments of a "
        f"{type(module).__name__}: give them first, or as hidden_states="
    )
