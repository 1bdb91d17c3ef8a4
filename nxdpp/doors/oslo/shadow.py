"""Shadow: a second object of a model over the same memory, which a pipeline trains instead of the user's.

::

    user's model     parameter ◀── DistributedDataParallel, optimizer
                         │ the same memory
    shadow           parameter ◀── Pipeline: traces, cuts, adds gradients

DistributedDataParallel averages the gradient of a parameter as soon as it is added. A pipeline adds one in each
microbatch, so it needs parameters of its own.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from nxdpp.counted import counted
from nxdpp.doors.local_modules import over_the_same_memory
from nxdpp.ground.torch_names import BUFFERS, HOOKS, PARAMETERS

_PLAIN = (bool, int, float, str)


class Pair(NamedTuple):
    """A parameter of this rank: its place in the user's model, and its shadow."""

    owner: nn.Module
    key: str
    shadow: nn.Parameter

    @property
    def parameter(self) -> nn.Parameter:
        """The present parameter in the user's model."""
        parameter: nn.Parameter | None = PARAMETERS.of(self.owner)[self.key]
        assert parameter is not None
        return parameter


class Shadow:
    """The shadow of ``model``, which shares its buffers and configuration.

    Attributes:
        module: the shadow.
        pairs: the parameters of this rank; empty before ``keep``.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._of: dict[int, nn.Parameter] = {}
        memo: dict[int, Any] = {id(model.config): model.config}
        for parameter in model.parameters():
            memo[id(parameter)] = self._of[id(parameter)] = over_the_same_memory(parameter)
        memo.update({id(buffer): buffer for buffer in model.buffers()})
        try:
            self.module: PreTrainedModel = copy.deepcopy(model, memo)
        except Exception as error:
            raise TypeError(
                f"a pipelined model needs a second object of its modules, and {type(model).__name__} cannot be copied: "
                f"remove the attribute that copy.deepcopy refuses ({type(error).__name__}: {error})"
            ) from error
        self._twins = list(zip(model.modules(), self.module.modules(), strict=True))
        self.pairs: list[Pair] = []
        self._modules: list[tuple[nn.Module, int]] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []

    def keep(self, local: nn.Module) -> None:
        """Free all tensors of the user's model except those in ``local``, this rank's part of the shadow."""
        kept = {id(tensor) for tensor in (*local.parameters(), *local.buffers())}
        on_meta: dict[int, nn.Parameter] = {}
        pairs: dict[int, Pair] = {}
        for module in self._model.modules():
            for key, parameter in PARAMETERS.of(module).items():
                if parameter is None:
                    continue
                shadow = self._of[id(parameter)]
                if id(shadow) in kept:
                    # Marks of the pipeline, such as the mark of a tied weight.
                    vars(parameter).update(vars(shadow))
                    pairs.setdefault(id(shadow), Pair(module, key, shadow))
                else:
                    PARAMETERS.of(module)[key] = on_meta.setdefault(id(parameter), _on_meta(parameter))
            for key, buffer in BUFFERS.of(module).items():
                if buffer is not None and id(buffer) not in kept:
                    BUFFERS.of(module)[key] = buffer.to("meta")
        self.pairs = list(pairs.values())
        self._of.clear()
        self._modules = [(module, _hooks(module)) for module in self._model.modules()]
        self._buffers = [
            (module, key, buffer)
            for module in self._model.modules()
            for key, buffer in BUFFERS.of(module).items()
            if buffer is not None and not buffer.is_meta
        ]

    def freed_names(self) -> list[str]:
        """Return the names of the user's tensors that other ranks hold."""
        parameters = self._model.named_parameters(remove_duplicate=False)
        buffers = self._model.named_buffers(remove_duplicate=False)
        return [name for name, tensor in (*parameters, *buffers) if tensor.is_meta]

    def follow(self, local: nn.Module) -> None:
        """Give the shadow and ``local`` the modes, plain attributes and memory of the user's model.

        Raises ``RuntimeError`` for modules and buffers of the user's model that were replaced, and for new hooks.
        """
        self._check_modules()
        self._check_buffers()
        for module, twin in self._twins:
            theirs = vars(twin)
            for name, value in vars(module).items():
                if type(value) in _PLAIN and theirs.get(name) != value:
                    theirs[name] = value
        if hasattr(self._model, "generation_config"):
            self.module.generation_config = self._model.generation_config
        # Modules that only ``local`` has are containers.
        modes = {name: module.training for name, module in self._model.named_modules(remove_duplicate=False)}
        for name, module in local.named_modules():
            module.training = modes.get(name, self._model.training)
        for pair in self.pairs:
            parameter, shadow = pair.parameter, pair.shadow
            shadow.requires_grad_(parameter.requires_grad)
            if shadow.data_ptr() != parameter.data_ptr() or shadow.dtype != parameter.dtype:
                shadow.data = parameter.detach()

    def _check_modules(self) -> None:
        present = list(self._model.modules())
        recorded = [module for module, _ in self._modules]
        if len(present) != len(recorded) or any(a is not b for a, b in zip(present, recorded, strict=True)):
            raise RuntimeError(
                "modules of the model were replaced after oslo.initialize with a pipeline, which would go on with the "
                "old ones: replace them before"
            )
        # Hooks of the model itself run around the whole step.
        changed = [type(module).__name__ for module, hooks in self._modules[1:] if _hooks(module) != hooks]
        if changed:
            raise RuntimeError(
                f"hooks of {counted(len(changed), 'module')}, of a {changed[0]} first, were changed after "
                "oslo.initialize with a pipeline, which does not run them: register them before"
            )

    def _check_buffers(self) -> None:
        replaced = [(module, key) for module, key, buffer in self._buffers if BUFFERS.of(module).get(key) is not buffer]
        if replaced:
            module, key = replaced[0]
            raise RuntimeError(
                f"{counted(len(replaced), 'buffer of the model was', 'buffers of the model were')} replaced after "
                f"oslo.initialize ({key} of a {type(module).__name__} first) with a pipeline, which would go on with "
                "the old ones: convert the model before, or write into the buffer in place"
            )


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    vars(meta).update(vars(parameter))
    return meta


def _hooks(module: nn.Module) -> int:
    return sum(len(hooks.of(module)) for hooks in HOOKS)
