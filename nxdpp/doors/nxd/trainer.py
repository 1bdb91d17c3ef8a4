"""Model of a training: built, padded, cut into stages, checkpointed and moved as the configuration says."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from nxdpp.agreement.exchange import check_replica_values
from nxdpp.doors.local_modules import LocalModules
from nxdpp.doors.nxd.config import check_sizes
from nxdpp.doors.nxd.model import NxDModel
from nxdpp.doors.random_states import all_random_states, set_all_random_states
from nxdpp.initialization.init_on_device import init_on_device
from nxdpp.pipeline.activation_checkpoint import apply_checkpoint
from nxdpp.pipeline.local.part import Part
from nxdpp.pipeline.model import NxDPPModel
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.group_values import broadcast_value
from nxdpp.tensor.move_model_to_device import move_model_to_device
from nxdpp.tensor.pad import pad_model
from nxdpp.tensor.tensor_copies import TensorCopies
from nxdpp.tracing.modules import listings
from nxdpp.tracing.modules.layers import find_layer_classes, layer_names


def initialize_parallel_model(
    nxd_config: dict[str, Any],
    model_fn: Callable[..., nn.Module],
    include_buffers: bool = False,
    *model_args: Any,
    **model_kwargs: Any,
) -> NxDModel:
    """Build ``model_fn(*model_args, **model_kwargs)`` and wrap it for training; collective over all ranks.

    The returned model is on the rank's device, in training mode, with its initial weights. Every rank builds the same
    model: seed before the call. Pipeline ranks may have different seeds, as of ``set_random_seed`` in the scripts of
    NeuronX Distributed: the model is built with the numbers of the first rank of the pipeline, of Python's, NumPy's and
    torch's generators. Afterwards each rank has its own again. Replicas are compared by a sample of their parameters.

    Args:
        nxd_config: of ``neuronx_distributed_config``.
        model_fn: builds the model.
        include_buffers: with ``meta_device_init``, also buffers are built on the meta device.
        model_args, model_kwargs: its arguments.

    Raises:
        ValueError, TypeError: for options that do not fit the model.
        RuntimeError: for a configuration with sizes other than the job's, for parameters without initial weights, and
            for replicas with different parameters.
    """
    check_sizes(nxd_config)
    if not isinstance(include_buffers, bool):
        raise TypeError(
            f"include_buffers={include_buffers!r:.80} must be True or False: it is the third argument, and arguments "
            f"of model_fn follow it. Write initialize_parallel_model(nxd_config, model_fn, False, ...)."
        )
    with _numbers_of_first_rank():
        return _initialized(nxd_config, model_fn, include_buffers, model_args, model_kwargs)


@contextmanager
def _numbers_of_first_rank() -> Iterator[None]:
    """Draw the numbers of the first rank of this pipeline where generators differ; collective over it."""
    if parallel_state.get_pipeline_model_parallel_size() == 1 or parallel_state.is_debug():
        yield
        return
    own = all_random_states()
    with board.call("initialize_parallel_model"), failure_watch.reported():
        of_first = broadcast_value(own, parallel_state.get_pipeline_control_group())
    if own == of_first:
        yield
        return
    set_all_random_states(of_first)
    try:
        yield
    finally:
        # A generator with the state of the first rank keeps the state that the model has left.
        after = zip(own, of_first, all_random_states(), strict=True)
        set_all_random_states(tuple(now if mine == first else mine for mine, first, now in after))


def _initialized(
    nxd_config: dict[str, Any],
    model_fn: Callable[..., nn.Module],
    include_buffers: bool,
    model_args: tuple[Any, ...],
    model_kwargs: dict[str, Any],
) -> NxDModel:
    init, pipeline = nxd_config["model_init_config"], nxd_config["pipeline_config"] or {}
    on_meta = init["meta_device_init"]
    with init_on_device(torch.device("meta"), include_buffers=include_buffers) if on_meta else nullcontext():
        module = model_fn(*model_args, **model_kwargs)
    if not isinstance(module, nn.Module) or isinstance(module, NxDPPModel | NxDModel):
        raise TypeError(f"model_fn must return a module that is not wrapped, not a {type(module).__name__}.")
    # A model of from_pretrained is in evaluation mode. Of another one parts may be.
    if not module.training:
        module.train()
    if nxd_config["pad_model"]:
        module = _padded(module)
    param_init_fn = pipeline.get("param_init_fn")
    if on_meta and init["param_init_fn"] is not None:
        param_init_fn = init["param_init_fn"]
    if nxd_config["pipeline_parallel_size"] > 1:
        zero1 = nxd_config["optimizer_config"]["zero_one_enabled"]
        wrapped = NxDPPModel(module, **{"use_zero1_optimizer": zero1, **pipeline, "param_init_fn": param_init_fn})
        _checkpoint(wrapped, nxd_config["activation_checkpoint_config"])
        wrapped.move_model_to_device()
        return NxDModel(wrapped, nxd_config)
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        names = [name for name, _ in listings.named_parameters(module, remove_duplicate=False)]
        owners = {name: {0} for name in names}
        Part(module, owners, 0, (), param_init_fn).materialise()
    if nxd_config["activation_checkpoint_config"] is not None:
        layers = layer_names(module, find_layer_classes(module, pipeline.get("transformer_layer_cls")))
        _checkpoint(LocalModules(module, module, layers), nxd_config["activation_checkpoint_config"])
    move_model_to_device(module, parallel_state.local_device())
    check_replica_values(module.named_parameters(), None)
    # The optimizer's steps compare the gradients of the copies.
    copies = TensorCopies(module)
    copies.verify(torch.initial_seed())
    return NxDModel(module, nxd_config, copies)


def _checkpoint(model: Any, config: Any) -> None:
    """Recompute the modules that ``activation_checkpoint_config`` names. Raises ``ValueError`` if there are none."""
    if config is None:
        return
    if config == "full":
        apply_checkpoint(model)
        return
    classes = tuple(config) if isinstance(config, tuple | list) else (config,)
    whole: Mapping[str, nn.Module] = dict(model.original_module.named_modules())
    names = [name for name, module in whole.items() if isinstance(module, classes)]
    if not names:
        found = ", ".join(sorted({type(module).__name__ for module in whole.values()}))
        wanted = ", ".join(each.__name__ for each in classes)
        raise ValueError(f"activation_checkpoint_config: the model has no {wanted}. It has: {found}.")
    apply_checkpoint(model, names)


def _padded(module: nn.Module) -> nn.Module:
    heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    if heads is None:
        raise ValueError(
            "pad_model=True takes the number of attention heads from model.config.num_attention_heads, and the model "
            "has none: call nxdpp.parallel_layers.pad.pad_model in model_fn, with pad_model=False."
        )
    return pad_model(module, parallel_state.get_tensor_model_parallel_size(), heads)
