"""A run of a module on example data, for its structure: a criterion that matches objects gives numbers to NumPy.

Fake tensors have no data for such code. The module has no parameters, so that its run is short.
"""

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from nxdpp.tracing.modules import listings

_SEED = 0


def takes_examples(module: nn.Module) -> bool:
    """Return whether ``module`` has no parameters, and is not one of torch."""
    of_torch = type(module).__module__.partition(".")[0] == "torch"
    return not of_torch and next(listings.parameters(module), None) is None


def run_on_examples(module: nn.Module, args: Any, kwargs: Any, guess: bool) -> Any:
    """Return fake tensors like the outputs of ``module`` for examples in place of fake tensors.

    Whole numbers are 0: an index that is always right. Booleans are ``guess``. Other numbers are between 0 and 1, as
    coordinates and probabilities are. The random generators of torch are unchanged.
    """
    examples: dict[int, torch.Tensor] = {}

    def example(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in examples:
            examples[id(leaf)] = _example(leaf, guess)
        return examples[id(leaf)]

    with unset_fake_temporarily(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(_SEED)
        args, kwargs = pytree.tree_map(example, (args, kwargs))
        for part in listings.modules(module):
            pytree.tree_map(example, (dict(part._buffers), dict(vars(part))))
        output = copy.deepcopy(module, dict(examples))(*args, **kwargs)
    return pytree.tree_map(_fake, output)


def _example(tensor: torch.Tensor, guess: bool) -> torch.Tensor:
    value: float = 0
    if tensor.dtype == torch.bool:
        value = guess
    elif tensor.is_floating_point() or tensor.is_complex():
        value = 0.5 if guess else 0.25
    return torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")


def _fake(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="cpu")
