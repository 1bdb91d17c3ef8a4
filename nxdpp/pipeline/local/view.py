"""Methods with which a user reads a rank's part of a model, under the names of the whole model."""

from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, NoReturn, Self

import torch
from torch import nn

from nxdpp.gradients.state_part import OF_MODEL, StatePart, is_divided
from nxdpp.ground.torch_names import BUFFERS, MODULES, PARAMETERS
from nxdpp.pipeline.input_names import call_by_name
from nxdpp.pipeline.local import outer_wrappers
from nxdpp.pipeline.local.wrapped_methods import is_elsewhere, refuse_setting, refused_member, wrapped_method
from nxdpp.ranks.faults.board import board
from nxdpp.tracing.code.frames import caller

_HOOKS = (
    "register_forward_hook", "register_forward_pre_hook", "register_backward_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook", "register_state_dict_pre_hook", "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook", "register_load_state_dict_post_hook",
)  # fmt: skip

# Properties of transformers' models, which read the first parameter. Another rank may hold it.
_OF_TENSORS = ("device", "dtype")


class LocalView(nn.Module):
    """Lists the parameters, buffers, modules and state of its ``local_module``; cannot be called or copied.

    No method is collective.
    """

    local_module: nn.Module

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module, such as ``config``; for its methods see ``wrapped_methods``.

        Raises ``AttributeError`` for modules and tensors of it that this rank does not hold. Raises ``RuntimeError``
        for wrappers of other runtimes, see ``outer_wrappers``.
        """
        outer_wrappers.refuse_reader(name)
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            module = self.__dict__.get("original_module")
            if module is None or name.startswith("_") or not hasattr(module, name):
                raise
            if name in _OF_TENSORS:
                return getattr(_any_tensor(self.local_module), name)
            value = getattr(module, name)
            if is_elsewhere(value, self.local_module):
                raise AttributeError(f"{error}; {_place(module, name)}", name=name, obj=self) from None
            if isinstance(value, MethodType) and value.__self__ in (module, type(module)):
                return wrapped_method(name, value, module, self.local_module, self.__dict__.get("tied_names", ()))
            return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of its own. Raises ``AttributeError`` for modules, and for attributes of the wrapped one."""
        outer_wrappers.refuse_forward(name)
        refuse_setting(self, name, value)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        """Names of its own attributes, and of the wrapped module's on this rank."""
        module = self.__dict__.get("original_module")
        parts = (*MODULES.of(module), *PARAMETERS.of(module), *BUFFERS.of(module)) if module is not None else ()
        public = (name for name in dir(module) if not name.startswith("_")) if module is not None else ()
        held = {name for name in public if name not in parts or hasattr(self, name)}
        return sorted({*super().__dir__(), *held})  # type: ignore[no-untyped-call]

    def local_named_parameters(self, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under their original names; takes the arguments of ``named_parameters``."""
        return self.local_module.named_parameters(**kwargs)

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for an optimizer."""
        return self.local_module.parameters()

    def local_named_buffers(self, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's buffers under their original names; takes the arguments of ``named_buffers``."""
        return self.local_module.named_buffers(**kwargs)

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """This rank's buffers."""
        return self.local_module.buffers()

    def local_modules(self) -> Iterator[nn.Module]:
        """This rank's modules, containers included."""
        return self.local_module.modules()

    def local_named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The outermost modules that this rank's stages run, under their original names: layers, embedding, norm."""
        return self.local_module.named_children()

    def local_children(self) -> Iterator[nn.Module]:
        """The outermost modules that this rank's stages run."""
        return (module for _, module in self.local_named_children())

    def local_named_modules(self, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """This rank's modules under their original names; takes the arguments of ``named_modules``.

        Modules above the layers are containers: empty ``nn.Module`` objects.
        """
        yield from self.local_module.named_modules(**kwargs)

    def local_state_dict(self, **kwargs: Any) -> dict[str, Any]:
        """This rank's part of the model's state dict, under its original names."""
        return self.local_module.state_dict(**kwargs)

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load this rank's part of a state dict, which may cover the whole model.

        With ``strict`` it must have all tensors of this rank, and no names that the whole model does not have. Tensors
        on the meta device get memory if ``state_dict`` has values for them.

        Raises:
            RuntimeError: for wrong names or shapes, and for an optimizer that holds a parameter on the meta device.
        """
        return self.load_state_dict(state_dict, strict=strict)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The same as ``local_named_modules``; ``named_parameters`` and ``named_buffers`` use it.

        Raises ``RuntimeError`` in an average over the whole model, or warns of it, see ``outer_wrappers``. Raises
        ``ValueError`` in a loss function, which would see this rank's part only.
        """
        frame = caller()
        outer_wrappers.refuse_penalty(frame)
        outer_wrappers.refuse_average(frame, self.local_module)
        # Before a step an optimizer lists them, maybe beside a teacher.
        if board.training_steps():
            outer_wrappers.warn_of_whole_copy(frame, self.__dict__.get("original_module"), self.local_module)
        yield from self.local_module.named_modules(*args, **kwargs)

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[nn.Module]:
        """This rank's modules. Raises ``RuntimeError`` in ``FullyShardedDataParallel``."""
        outer_wrappers.refuse_lister(caller())
        yield from super().modules(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        """The local module of this original name; ``get_parameter`` and ``get_buffer`` use it."""
        return self.local_module.get_submodule(target)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The same as ``local_state_dict``, but that a pickle of it is refused where it is not the whole model's.

        A module around this one gets the plain tensors, by ``destination``.
        """
        state = self.local_module.state_dict(*args, **kwargs)
        if args or kwargs.get("destination") is not None or not is_divided(self.local_module.parameters()):
            return state
        return StatePart.of(state, OF_MODEL.format(len(state)))

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """Raise ``RuntimeError``: the model would be trained on uninitialised memory."""
        raise RuntimeError(
            "to_empty() would leave parameters in fresh memory: call move_model_to_device() or materialise(), "
            "which initialise them, nxdpp.load_pretrained(model, directory), or load_state_dict(). Each of them "
            "allocates memory itself."
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ``RuntimeError``: a pipeline runs by ``run_train`` and ``run_eval``."""
        call = call_by_name(self.original_module, args, kwargs)
        raise RuntimeError(
            f"a pipelined model cannot be called: use run_train({call}) for forward and backward, run_eval({call}) "
            f"for forward alone."
        )

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ``RuntimeError``: ``apply_compile`` compiles the layers."""
        raise RuntimeError(outer_wrappers.COMPILED)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise ``TypeError``: a stage has connections to other ranks."""
        raise TypeError(
            "a pipelined model cannot be pickled (torch.save(model)): use nxdpp.save_pretrained or "
            "nxdpp.save_checkpoint, or torch.save(model.local_state_dict(), file) with a file for each rank."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        """Raise ``TypeError``: a stage has connections to other ranks."""
        raise TypeError(
            "a pipelined model cannot be copied, also by AveragedModel: a stage has connections to other ranks. Copy "
            "this rank's part, local_module: averaged = AveragedModel(model.local_module), after each step "
            "averaged.update_parameters(model.local_module). model.load_state_dict(averaged.module.state_dict()), on "
            "every rank, makes the model run with the copy's values."
        )


def _refused_hook(kind: str) -> Callable[..., NoReturn]:
    def refuse(self: LocalView, *args: Any, **kwargs: Any) -> NoReturn:
        outer_wrappers.refuse_hook(args[0] if args else None)
        raise RuntimeError(
            f"{kind} of a pipelined model: the hook would never run, since stages run layers and the modules beside "
            f"them. Register it on such a module: wrapped.local_module.get_submodule(NAME).{kind}(...)."
        )

    return refuse


def _refuse_member(self: LocalView, name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise refused_member(name)


outer_wrappers.refuse_as_child(LocalView)
for _kind in ("add_module", "register_buffer", "register_module", "register_parameter"):
    setattr(LocalView, _kind, _refuse_member)
for _kind in _HOOKS:
    setattr(LocalView, _kind, _refused_hook(_kind))


def _any_tensor(tree: nn.Module) -> torch.Tensor:
    """A floating parameter of ``tree``, otherwise a tensor as torch makes it."""
    return next((parameter for parameter in tree.parameters() if parameter.is_floating_point()), torch.empty(0))


def _place(module: nn.Module, name: str) -> str:
    """Return where a user finds the module or tensor ``name`` of the wrapped ``module``."""
    whole = f"the {type(module).__name__} that it wraps has one"
    if name in MODULES.of(module):
        return f"{whole}. local_module.{name} has this rank's part of it."
    return f"{whole}, which another rank holds: local_named_parameters() has those of this rank."
