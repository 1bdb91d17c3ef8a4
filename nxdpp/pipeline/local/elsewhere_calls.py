"""Calls of modules whose parameters other ranks hold: the user's own module was called, in place of the pipeline.

On this rank such a module would return a tensor without values, or fail far inside torch.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nxdpp.ground.torch_names import FORWARD_PRE_HOOKS
from nxdpp.pipeline.local.tree import is_freed
from nxdpp.pipeline.partition.assignment import Owners
from nxdpp.tracing.modules import listings
from nxdpp.tracing.values.nested import leaves_of


def refuse_calls_elsewhere(root: nn.Module, owners: Owners, local: nn.Module) -> None:
    """Make each outermost module of ``root`` that ``local`` has no part of raise ``RuntimeError`` in a call.

    No stage of this rank runs such a module. Traces, which give it tensors without values, still do.
    """
    here = {name for name, _ in listings.named_modules(local, remove_duplicate=False)}
    for name, module in listings.named_modules(root, remove_duplicate=False):
        if name in here or name.rpartition(".")[0] not in here or _refuses(module):
            continue
        if any(map(is_freed, listings.parameters(module))):
            inside = (ranks for parameter, ranks in owners.items() if parameter.startswith(f"{name}."))
            refuse = _Refusal(name, type(root).__name__, sorted(set().union(*inside)))
            module.register_forward_pre_hook(refuse, with_kwargs=True)


def is_refusal(hook: object) -> bool:
    """Return whether ``hook`` is one of ``refuse_calls_elsewhere``, also of another wrapper over the same module."""
    return isinstance(hook, _Refusal)


def _refuses(module: nn.Module) -> bool:
    return any(map(is_refusal, FORWARD_PRE_HOOKS.of(module).values()))


class _Refusal:
    """The hook of one module.

    Args:
        name: of the module.
        model: type of the model.
        ranks: the pipeline ranks that hold the module.
    """

    def __init__(self, name: str, model: str, ranks: list[int]) -> None:
        self._name = name
        self._model = model
        self._ranks = ranks

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise ``RuntimeError`` for a call with values. Copies of ``module`` that have values may be called."""
        has_values = any(type(leaf) is torch.Tensor and not leaf.is_meta for leaf in leaves_of((args, dict(kwargs))))
        if has_values and any(parameter.is_meta for parameter in listings.parameters(module)):
            raise RuntimeError(
                f"{self._name} ({type(module).__name__}) is called on a rank that has no values of it: after wrapping, "
                f"the {self._model} holds on each rank what its stages run, and {self._name} is on pipeline rank "
                f"{', '.join(map(str, self._ranks))}. Run steps of the wrapped model, on all ranks: "
                f"wrapped.run_train(...) for forward and backward, wrapped.run_eval(...) for forward only."
            )
