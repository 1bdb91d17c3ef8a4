"""Initial weights for the meta tensors that a rank holds.

A tensor gets marked memory, and its module initialises it. An element that still has the mark is an error. A tied
weight is initialised in the first module that has it, even if that module runs on another rank. So a head that shares
the embedding's weight gets the embedding's numbers::

    first rank    embed.weight ─▶ memory ─▶ init(embed) ─▶ embed
    last rank     embed.weight ─▶ memory ─▶ init(embed) ─▶ head; embed has its meta tensor again

Of the modules of which the rank holds parts, one at a time is whole in memory, until its parts are taken.
``param_init_fn`` gets all modules of a stage whole: a module may write to others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nxdpp.counted import counted
from nxdpp.ground.torch_names import BUFFERS, MODULES, PARAMETERS
from nxdpp.initialization import initialisers
from nxdpp.initialization.allocation import MarkedMemory, allocate, count_unwritten, replacement, with_type_of
from nxdpp.initialization.initialisers import HuggingFaceInitialiser, ParameterInitialiser
from nxdpp.initialization.named_streams import NamedStreams
from nxdpp.initialization.parts import own_part, part_of, whole_of
from nxdpp.initialization.record import ConstructorRecord

_SHOWN = 8
_OF_EACH_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True, eq=False)
class MetaTensor:
    """A meta tensor, and the name under which it is initialised: its first name in the model."""

    name: str
    tensor: torch.Tensor

    @property
    def module(self) -> str:
        """Name of its module."""
        return self.name.rpartition(".")[0]

    @property
    def key(self) -> str:
        """Its name in its module."""
        return self.name.rpartition(".")[2]


def initial_weights(
    root: nn.Module,
    metas: Sequence[MetaTensor],
    seed: int,
    param_init_fn: ParameterInitialiser | None,
    record: ConstructorRecord | None = None,
) -> tuple[list[torch.Tensor], bool]:
    """Initialise ``metas`` of the whole model ``root``, which is unchanged; not collective.

    Each module of these tensors is passed to ``param_init_fn``. Without that function, transformers models use their
    ``_init_weights`` and other modules their ``reset_parameters``. A buffer that ``param_init_fn`` does not write comes
    from the ``record`` of the constructor, or from the same methods.

    Returns CPU tensors in the order of ``metas``, and whether they contain random numbers. Raises ``RuntimeError`` for
    tensors that are not or only partly initialised, or replaced by a different shape or dtype.
    """
    values: dict[MetaTensor, torch.Tensor] = {}
    has_drawn = False
    for group in _groups(metas, param_init_fn is None):
        made, draws = _initialised(root, group, seed, param_init_fn, record)
        values.update(zip(group, made, strict=True))
        has_drawn |= draws
    return [values[meta] for meta in metas], has_drawn


def _groups(metas: Sequence[MetaTensor], one_by_one: bool) -> list[list[MetaTensor]]:
    """``metas`` that are in memory together: per module with parts, if ``one_by_one``, and all the others."""
    with_parts = {meta.module for meta in metas if one_by_one and part_of(meta.tensor) is not None}
    groups: dict[str | None, list[MetaTensor]] = {None: []}
    for meta in metas:
        groups.setdefault(meta.module if meta.module in with_parts else None, []).append(meta)
    return list(groups.values())


def _initialised(
    root: nn.Module,
    metas: Sequence[MetaTensor],
    seed: int,
    param_init_fn: ParameterInitialiser | None,
    record: ConstructorRecord | None,
) -> tuple[list[torch.Tensor], bool]:
    before = _tensors_at(root, metas)
    try:
        # Temporaries must be on the CPU whatever the caller's context: each device has its own generator.
        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
            allocated = [_allocate(meta.tensor) for meta in metas]
            for meta, tensor in zip(metas, allocated, strict=True):
                _put(root, meta, tensor)
            initialiser = _Initialisation(root, metas, seed, param_init_fn, record)
            initialiser.run()
            made = zip(_tensors_at(root, metas), allocated, strict=True)
            values = [value if value is own else replacement(own, value) for value, own in made]
            values = [_own(value, meta) for value, meta in zip(values, metas, strict=True)]
            return values, initialiser.streams.has_drawn
    finally:
        for meta, tensor in zip(metas, before, strict=True):
            _put(root, meta, tensor)


class _Initialisation:
    """One run over the modules of ``metas``, whose tensors have marked memory."""

    def __init__(
        self,
        root: nn.Module,
        metas: Sequence[MetaTensor],
        seed: int,
        param_init_fn: ParameterInitialiser | None,
        record: ConstructorRecord | None,
    ) -> None:
        self._root = root
        self._record = record
        self._metas = metas
        self._function = param_init_fn
        self._source = "_init_weights and reset_parameters" if param_init_fn is None else "param_init_fn"
        self._huggingface = HuggingFaceInitialiser(root)
        allocated = {meta.name: tensor for meta, tensor in self._current()}
        own = set(map(id, allocated.values()))
        everything = [*nn.Module.parameters(root), *nn.Module.buffers(root)]
        # Tensors that were loaded before, or built in memory.
        self._done = [tensor for tensor in everything if id(tensor) not in own and not tensor.is_meta]
        self.streams = NamedStreams(seed, allocated, self._done)

    def run(self) -> None:
        if self._function is None:
            with MarkedMemory(), self.streams:
                self._huggingface.run(set(self._modules(self._metas)), self._done, self.streams.begin)
        else:
            with MarkedMemory(), self.streams:
                for name in self._modules(self._metas):
                    self._call(self._function, name)
            self._check_written([meta for meta in self._unwritten() if isinstance(meta.tensor, nn.Parameter)])
            self._replay_recorded()
            self._guard_written()
        # Tensors that are left: children first, as a parent may change the values of its children.
        with MarkedMemory(), self.streams:
            for name in reversed(self._modules_to_complete()):
                self._complete(name)
            if self._function is not None:
                # A function may make a child with buffers anew, as functions of NeuronX Distributed's scripts do.
                for name in dict.fromkeys(meta.module.rpartition(".")[0] for meta in self._unwritten() if meta.module):
                    self._call(self._function, name)
        self._check_written(self._unwritten())
        self._check_layouts()

    def _call(self, function: ParameterInitialiser, name: str) -> None:
        self.streams.begin(name)
        module = self._root.get_submodule(name)
        children: dict[str, nn.Module | None] = dict(MODULES.of(module))
        try:
            initialisers.call_param_init_fn(function, module)
        except Exception as error:
            error.add_note(f"in param_init_fn, called for {name or 'the model itself'}")
            raise
        for key, child in children.items():
            made: nn.Module | None = MODULES.of(module).get(key)
            if child is None or made is child:
                continue
            # A child that is made anew gives its tensors and attributes to the child that all others know.
            MODULES.of(module)[key] = child
            if type(made) is not type(child) or MODULES.of(made) or MODULES.of(child):
                raise RuntimeError(
                    f"param_init_fn replaced {f'{name}.' if name else ''}{key}, a {type(child).__name__}, with "
                    f"{made.__class__.__name__}: only a module of the same class without submodules can be made anew. "
                    f"Replace it before the model is wrapped, or write its tensors in place."
                )
            PARAMETERS.of(child).update(PARAMETERS.of(made))
            BUFFERS.of(child).update(BUFFERS.of(made))
            vars(child).update({own: value for own, value in vars(made).items() if own not in _OF_EACH_MODULE})

    def _replay_recorded(self) -> None:
        for meta in self._unwritten():
            if self._record is not None and self._record.is_written(whole_of(meta.tensor)):
                whole = self._record.materialise(whole_of(meta.tensor))
                _put(self._root, meta, with_type_of(whole, meta.tensor))

    def _guard_written(self) -> None:
        written = [tensor for _, tensor in self._current() if self._is_written(tensor)]
        self._done += written
        self.streams.guard(written)

    def _modules_to_complete(self) -> list[str]:
        """Modules with unwritten tensors, and their ancestors, in the model's order.

        An ancestor with tensors may initialise its descendants. So it is called even if its own tensors are elsewhere.
        """
        having = set(self._modules(self._unwritten()))
        return [
            name
            for name, module in self._root.named_modules(remove_duplicate=False)
            if name in having
            or (
                initialisers.has_own_tensors(module)
                and not self._huggingface.knows(name)
                and any(not name or inner.startswith(f"{name}.") for inner in having)
            )
        ]

    def _complete(self, name: str) -> None:
        """Initialise in the order of the constructor: the module itself first, then its transformers model."""
        self.streams.begin(name)
        initialisers.reset_parameters(self._root.get_submodule(name))
        if self._huggingface.knows(name):
            self._huggingface.run_one(name, self._done)

    def _current(self) -> list[tuple[MetaTensor, torch.Tensor]]:
        return list(zip(self._metas, _tensors_at(self._root, self._metas), strict=True))

    def _unwritten(self) -> list[MetaTensor]:
        """The tensors that are not completely written."""
        return [meta for meta, tensor in self._current() if not self._is_written(tensor)]

    def _is_written(self, tensor: torch.Tensor) -> bool:
        if tensor.is_meta:
            return False
        if tensor.is_floating_point() or tensor.is_complex():
            return count_unwritten(tensor) == 0
        return self.streams.wrote(tensor) or tensor.numel() == 0

    def _modules(self, metas: Sequence[MetaTensor]) -> list[str]:
        """Names of the modules of ``metas``, in the model's order."""
        having = {meta.module for meta in metas}
        return [name for name, _ in self._root.named_modules(remove_duplicate=False) if name in having]

    def _check_written(self, unwritten: Sequence[MetaTensor]) -> None:
        if not unwritten:
            return
        lines = []
        for meta, tensor in zip(unwritten, _tensors_at(self._root, unwritten[:_SHOWN]), strict=False):
            module = type(self._root.get_submodule(meta.module)).__name__
            count = (0 if tensor.is_meta else count_unwritten(tensor)) or tensor.numel()
            lines.append(f"  {meta.name} of {module}: {count} of {tensor.numel()} elements")
        if len(unwritten) > _SHOWN:
            lines.append(f"  and {len(unwritten) - _SHOWN} more")
        build = (
            "build the model with nxdpp.deferred_init, which repeats its constructor (nxdpp.init_on_device does so for "
            "buffers), or load them with nxdpp.load_pretrained"
        )
        if self._function is None:
            remedy = f"Give the modules a reset_parameters() that writes them, or give a param_init_fn; {build}."
        else:
            remedy = (
                f"It is called with each of these modules, and must write all tensors of the module itself, in place. "
                f"Correct it, or leave it out and {build}."
            )
        left = counted(len(unwritten), "parameter or buffer is", "parameters or buffers are")
        raise RuntimeError("\n".join([f"{left} left without values by {self._source}:", *lines, remedy]))

    def _check_layouts(self) -> None:
        for meta, tensor in self._current():
            want = whole_of(meta.tensor)
            if (tensor.shape, tensor.dtype) != (want.shape, want.dtype):
                raise RuntimeError(
                    f"{meta.name} is {want.dtype} of {list(want.shape)} in the model, and was replaced by "
                    f"{tensor.dtype} of {list(tensor.shape)} by {self._source}. Write into it with torch.nn.init or "
                    f"copy_(); cast it in post_partition_hooks."
                )


def _allocate(meta: torch.Tensor) -> torch.Tensor:
    """Memory for ``meta``, or for the whole of which it is a part."""
    return allocate(meta) if part_of(meta) is None else with_type_of(allocate(whole_of(meta)), meta)


def _own(value: torch.Tensor, meta: MetaTensor) -> torch.Tensor:
    """The part of the initialised ``value`` that the rank holds."""
    return value if part_of(meta.tensor) is None else replacement(value, own_part(value, meta.tensor))


def _tensors_at(root: nn.Module, metas: Sequence[MetaTensor]) -> list[torch.Tensor]:
    return [getattr(root.get_submodule(meta.module), meta.key) for meta in metas]


def _put(root: nn.Module, meta: MetaTensor, tensor: torch.Tensor) -> None:
    """Put ``tensor`` into its module, without the checks of an assignment."""
    module = root.get_submodule(meta.module)
    registries: tuple[dict[str, Any], ...] = (PARAMETERS.of(module), BUFFERS.of(module), vars(module))
    for registry in registries:
        if meta.key in registry:
            registry[meta.key] = tensor
            return
    raise AssertionError(f"{meta.name} is not in the model")
