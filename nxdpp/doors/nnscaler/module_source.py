"""The module or class that a program gives, and the modules that are made of it; a given module stays as it is."""

import copy
import inspect
import warnings
from collections.abc import Callable

import torch
from torch import nn

from nxdpp.agreement.comparison import unequal
from nxdpp.agreement.same_values import sample
from nxdpp.counted import counted
from nxdpp.doors.local_modules import over_the_same_memory
from nxdpp.doors.nnscaler.state_dicts.extra_state import parallel_modules
from nxdpp.initialization.deferred_init import deferred_init
from nxdpp.ranks.exchange import Exchange
from nxdpp.ranks.group_values import from_rank_0


class ModuleSource:
    """The module or class that was given, and the modules that are made of it.

    Args:
        module_or_module_class, module_fn, dtype: as ``parallelize`` takes them.

    Attributes:
        given: the module, or ``None`` for a class.
        kind: the class.

    Raises ``TypeError``, ``ValueError`` or ``RuntimeError`` for arguments that do not fit together, and for a module
    in which others are parallel already.
    """

    def __init__(
        self,
        module_or_module_class: nn.Module | type[nn.Module],
        module_fn: Callable[[], nn.Module] | None,
        dtype: torch.dtype | None,
    ) -> None:
        self._dtype = dtype
        self.given = None if isinstance(module_or_module_class, type) else module_or_module_class
        kind = module_or_module_class if isinstance(module_or_module_class, type) else type(module_or_module_class)
        if not issubclass(kind, nn.Module):
            raise TypeError(f"parallelize takes a module or a class of modules, not {module_or_module_class!r:.80}")
        self.kind = kind
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"module_dtype must be a floating dtype of torch or None, not {dtype!r}")
        if self.given is not None:
            _check_given(self.given, module_fn)
        elif module_fn is None:
            _check_constructor(kind)
        self._construct = module_fn or kind
        self._whole: nn.Module | None = None
        self._random_state: torch.Tensor | None = None

    def traced(self) -> nn.Module:
        """Return a module to trace, whose values do not count."""
        if self.given is not None:
            return self._converted(shared_copy(self.given))
        with torch.random.fork_rng(devices=[]):
            return deferred_init(self._made)

    def check_values(self) -> None:
        """Raise ``ValueError`` for a given module without memory."""
        parameters = () if self.given is None else self.given.named_parameters()
        if without := [name for name, parameter in parameters if parameter.is_meta]:
            raise ValueError(
                f"{without[0]} of the given {self.kind.__name__} is on the meta device and has no values: give a "
                f"module with values, or the class with module_fn"
            )

    def take_first_values(self) -> None:
        """Take the values of rank 0, or for a class its random state; collective over all ranks."""
        if self.given is None:
            self._random_state = Exchange().from_first(torch.get_rng_state)
            return
        self._whole = self._converted(shared_copy(self.given))
        _take_first_values(self._whole)

    def make(self, without_memory: bool) -> nn.Module:
        """Return the module with the values of rank 0; collective over all ranks, after ``take_first_values``.

        A class is made ``without_memory`` for a pipeline, whose stages make their own tensors.
        """
        if self._whole is not None:
            return self._whole
        assert self._random_state is not None, "the values of rank 0 are taken first"
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random_state)
            if without_memory:
                return deferred_init(self._made)
            module = self._made()
        # A constructor may draw from generators other than torch's.
        _take_first_values(module)
        return module

    def _made(self) -> nn.Module:
        module = self._construct()
        if not isinstance(module, self.kind):
            raise ValueError(f"module_fn must return a {self.kind.__name__}, not a {type(module).__name__}")
        return self._converted(module)

    def _converted(self, module: nn.Module) -> nn.Module:
        return module if self._dtype is None else module.to(self._dtype)


def _check_given(given: nn.Module, module_fn: Callable[[], nn.Module] | None) -> None:
    if module_fn is not None:
        raise ValueError("module_fn makes the modules of a class, and an object was given: leave it out")
    for prefix in parallel_modules(given):
        where = f"its {prefix.removesuffix('.')}" if prefix else "it"
        raise RuntimeError(f"{type(given).__name__} cannot be made parallel: {where} is a ParallelModule already")


def _check_constructor(kind: type[nn.Module]) -> None:
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise ValueError(
            f"{kind.__name__}() is called without arguments, and has {error}: give module_fn=lambda: "
            f"{kind.__name__}(...)"
        ) from None


def shared_copy(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` whose parameters are new objects over the same memory.

    Ties stay. Buffers and other attributes are copied. A module on the meta device is returned as it is: a copy would
    lose what ``deferred_init`` has recorded. So is one that cannot be copied, with a warning.
    """
    parameters = list(module.parameters())
    if any(parameter.is_meta for parameter in parameters):
        return module
    try:
        return copy.deepcopy(module, {id(parameter): over_the_same_memory(parameter) for parameter in parameters})
    except Exception as error:
        warnings.warn(
            f"the given {type(module).__name__} cannot be copied ({type(error).__name__}: {error}), and is used up: "
            f"use the parallel module in its place",
            stacklevel=4,
        )
        return module


def take_own_memory(part: nn.Module, module: nn.Module) -> None:
    """Give each parameter of ``part`` memory of its own if it shares memory with ``module``."""
    if part is module:
        return
    shared = {_memory(parameter) for parameter in module.parameters()}
    for parameter in part.parameters():
        if not parameter.is_meta and _memory(parameter) in shared:
            parameter.data = parameter.data.clone()


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _take_first_values(module: nn.Module) -> None:
    """Give all ranks the parameters and buffers of rank 0, in new memory; collective over all ranks.

    nnScaler keeps the values of the module that rank 0 has traced. Nothing is sent if all ranks have equal values.
    Tensors on the meta device have no values to compare.

    Raises ``ValueError`` for modules with different names, shapes or dtypes than on rank 0.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    tensors = [(name, tensor) for name, tensor in named if not tensor.is_meta]
    found = unequal([f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors])
    if found is not None:
        pairs = zip(*([*kinds, "nothing"] for kinds in found.values), strict=False)
        there, here = next(pair for pair in pairs if pair[0] != pair[1])
        raise ValueError(f"rank {found.ranks[1]} gave another module than rank 0: it has {here}, and rank 0 {there}")
    everyones = Exchange().gather([sample(tensor, tensor.numel()) for _, tensor in tensors])
    differ = [each for each, digests in zip(tensors, zip(*everyones, strict=True), strict=True) if len({*digests}) > 1]
    if not differ:
        return
    warnings.warn(
        f"the ranks gave modules with other values ({differ[0][0]} is the first of {counted(len(differ), 'tensor')}): "
        f"all take those of rank 0",
        stacklevel=4,
    )
    for _, tensor in differ:
        tensor.data = tensor.detach().clone()
        tensor.data.copy_(from_rank_0(tensor.detach()))
