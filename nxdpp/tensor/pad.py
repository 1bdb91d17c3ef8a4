"""Padding of attention heads to a multiple of the tensor-parallel size, with the names of NeuronX Distributed.

Heads of zeros are added behind the others, so that each rank has whole heads::

    3 heads of 4 on 2 ranks      rank 0               rank 1
    before                       0000 11              11 2222
    after                        0000 1111            2222 pppp

The padded heads do not matter: the layer behind the attention takes zeros in their place. Outputs, gradients and
trained parameters equal the unpadded model's. NeuronX Distributed appends zeros to each rank's own rows, ``0000 11pp``
and ``11 2222pp``: there whole heads need a checkpoint that was padded before.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import torch
from torch import nn

from nxdpp.gradients.replaced_parameters import check_no_optimizer_holds, watch_replaced
from nxdpp.initialization.recorder import is_recording
from nxdpp.tensor.layers import ColumnParallelLinear, RowParallelLinear
from nxdpp.tensor.padding import padded_part
from nxdpp.tensor.parallel_layer import ParallelLayer

M = TypeVar("M", bound=nn.Module)


def get_number_of_extra_heads(n_head: int, tp_degree: int) -> int:
    """Return how many heads ``n_head`` lacks to a multiple of ``tp_degree``."""
    return -n_head % tp_degree


def generate_padding_mask(
    num_heads: int, num_heads_with_pad: int, num_kv_heads: int, tp_degree: int, tp_rank: int, hardware_type: None = None
) -> torch.Tensor:
    """Return which of a rank's query heads are heads of the model: bool ``(num_heads_with_pad / tp_degree,)``.

    It is for a model that pads the query heads of each key-value head, and not, as ``pad_model``, behind all heads:
    with 6 heads, 1 key-value head and 4 ranks of 2, the last rank has 2 of padding. Copies of a key-value head are on
    neighbouring ranks, as in ``GQAQKVColumnParallelLinear``: NeuronX Distributed's layout of ``hardware.TRN2``.

    Args:
        num_heads: query heads of the whole model, ``num_heads_with_pad`` with padding.
        num_kv_heads: key-value heads of the whole model.
        tp_degree: the tensor-parallel size, a multiple or a divisor of ``num_kv_heads``.
        tp_rank: the tensor-parallel rank.
        hardware_type: ``None``; there is one layout.

    Raises ``ValueError`` for a ``hardware_type``.
    """
    if hardware_type is not None:
        raise ValueError(
            f"hardware_type={hardware_type!r} has no meaning: copies of a head are neighbours. Leave it out."
        )
    of_rank = num_heads_with_pad // tp_degree
    copies = max(tp_degree // num_kv_heads, 1)
    first = of_rank * (tp_rank % copies)
    return torch.arange(first, first + of_rank) < num_heads // num_kv_heads * (num_kv_heads * copies // tp_degree)


def pad_model(
    model: M,
    tp_degree: int,
    n_heads: int,
    wrapped_classes: Sequence[type[nn.Module]] = (),
    pad_hook_fn: Callable[[Any, float], object] | None = None,
) -> M:
    """Pad the tensor-parallel linear layers of ``model`` for whole heads on each rank; return the model, changed.

    The divided size of each layer grows by the ratio of padded heads to heads, with zeros. Column-parallel layers pad
    outputs, row-parallel layers inputs. The model must work with the padded number of heads: its attention divides
    ``heads + get_number_of_extra_heads(heads, tp_degree)`` by the tensor-parallel size. Call it before wrapping and
    before an optimizer is made. Collective over the tensor group, unless the model is on the meta device.

    Args:
        model: with tensor-parallel layers.
        tp_degree: a multiple of the tensor-parallel size, of which the padded number of heads is a multiple.
        n_heads: number of attention heads, without padding. Key-value heads grow by the same ratio.
        wrapped_classes: classes in which layers are padded, such as the attention. By default all layers of the model
            are padded where a row-parallel layer takes the output of column-parallel ones: in the smallest module that
            has both. A language model's head, which stands behind them, stays as it is, and so does its output.
        pad_hook_fn: called with each module of ``wrapped_classes`` and the ratio, to change its own sizes.

    Raises:
        ValueError: for a ``tp_degree`` that does not fit, for classes that the model does not have, for sizes that do
            not divide after padding, and for layers whose use is not clear. Nothing is changed then.
        RuntimeError: for an optimizer that holds the parameters, and inside ``deferred_init``.
    """
    if n_heads < 1 or tp_degree < 1:
        raise ValueError(f"n_heads={n_heads} and tp_degree={tp_degree} must be at least 1")
    ratio = Fraction(n_heads + get_number_of_extra_heads(n_heads, tp_degree), n_heads)
    if is_recording():
        raise RuntimeError("pad_model cannot run in deferred_init: build under init_on_device(torch.device('meta'))")
    wrapped = _wrapped(model, tuple(wrapped_classes), pad_hook_fn)
    layers = _layers_in(wrapped) if wrapped_classes else _layers_of_pairs(model)
    sizes = {name: _sizes(name, layer, ratio, tp_degree) for name, layer in layers.items()}
    if ratio == 1:
        return model
    _replace(model, layers, sizes)
    for module in wrapped.values():
        if pad_hook_fn is not None:
            pad_hook_fn(module, float(ratio))
    return model


def _wrapped(
    model: nn.Module, classes: tuple[type[nn.Module], ...], hook: Callable[[Any, float], object] | None
) -> dict[str, nn.Module]:
    if hook is not None and not classes:
        raise ValueError("pad_hook_fn is called with the modules of wrapped_classes: give these classes too")
    found = {name: module for name, module in model.named_modules() if isinstance(module, classes)}
    if classes and not found:
        names = ", ".join(each.__name__ for each in classes)
        raise ValueError(f"the model has no module of wrapped_classes ({names})")
    return found


def _layers_in(modules: dict[str, nn.Module]) -> dict[str, ParallelLayer]:
    return {
        f"{name}.{inner}" if inner and name else name or inner: layer
        for name, module in modules.items()
        for inner, layer in module.named_modules()
        if _is_linear(layer)
    }


def _layers_of_pairs(model: nn.Module) -> dict[str, ParallelLayer]:
    """The layers in the smallest modules with column- and row-parallel ones, the innermost first."""
    free = {name: layer for name, layer in model.named_modules() if _is_linear(layer)}
    chosen: dict[str, ParallelLayer] = {}
    for name in sorted(free, key=lambda each: -each.count(".")):
        if name not in free or not isinstance(free[name], RowParallelLinear):
            continue
        parent = name
        inside: dict[str, ParallelLayer] = {}
        while parent and all(isinstance(layer, RowParallelLinear) for layer in inside.values()):
            parent = parent.rpartition(".")[0]
            inside = {n: layer for n, layer in free.items() if not parent or n.startswith(f"{parent}.")}
        free = {n: layer for n, layer in free.items() if n not in inside}
        chosen.update(_without_heads(inside))
    return chosen


def _without_heads(inside: dict[str, ParallelLayer]) -> dict[str, ParallelLayer]:
    """The layers but for those behind all row-parallel ones that none of them can take, as a language model's head.

    Raises ``ValueError`` for such a layer in front of a row-parallel one: its output may go elsewhere.
    """
    rows = {name: layer.input_size for name, layer in inside.items() if isinstance(layer, RowParallelLinear)}
    last, order = [*rows][-1], [*inside]
    chosen = dict(inside)
    for name, layer in inside.items():
        if not isinstance(layer, ColumnParallelLinear):
            continue
        if all(size % (layer.output_size // layer.stride) for size in rows.values()):
            if order.index(name) > order.index(last):
                del chosen[name]
            elif not layer.gather_output:
                raise ValueError(
                    f"{name} has {layer.output_size} outputs, and the RowParallelLinear next to it other inputs "
                    f"({rows}): padding of {name} may change the model. Give wrapped_classes, the classes of the "
                    f"attention."
                )
    return chosen


def _is_linear(module: nn.Module) -> bool:
    return hasattr(module, "padded_sizes")


def _sizes(name: str, layer: Any, ratio: Fraction, tp_degree: int) -> dict[str, int]:
    """The padded sizes of the layer's parameters; ``ValueError`` where they are not whole or do not divide."""
    if tp_degree % layer.tensor_parallel_size:
        raise ValueError(
            f"tp_degree={tp_degree} is no multiple of the tensor-parallel size {layer.tensor_parallel_size} for which "
            f"{name} was built: no rank would have whole heads"
        )
    sizes: dict[str, Fraction] = layer.padded_sizes(ratio)
    for key, size in sizes.items():
        attributes = vars(layer.get_parameter(key))
        pieces = attributes["num_partitions"] * attributes["partition_stride"]
        if size % pieces:
            raise ValueError(
                f"{name}.{key} has {attributes['whole_size']} divided elements. Padded by the ratio of heads, {ratio}, "
                f"it has {size}, which is no multiple of {pieces}. Give wrapped_classes where this is no attention. "
                f"Key-value heads can be padded where the ratio gives a multiple of {tp_degree} of them."
            )
    return {key: int(size) for key, size in sizes.items()}


def _replace(model: nn.Module, layers: dict[str, ParallelLayer], sizes: dict[str, dict[str, int]]) -> None:
    old = {f"{name}.{key}": layers[name].get_parameter(key) for name, keys in sizes.items() for key in keys}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in old and any(parameter is each for each in old.values()):
            raise ValueError(f"{name} is one parameter with a layer that is padded: tie weights after pad_model()")
    check_no_optimizer_holds(old, "Make the optimizer after pad_model(), from the parameters that the model has then.")
    for name, keys in sizes.items():
        for key, size in keys.items():
            layers[name].register_parameter(key, padded_part(layers[name].get_parameter(key), size))
    watch_replaced(old)
