"""Torch function mode in which a constructor sees its meta tensors as CPU tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nxdpp.ground.torch_names import NO_DISPATCH_MODES, NO_TORCH_FUNCTION, pytree
from nxdpp.initialization.recorder import ConstructorRecorder, check_device

Tensor = torch.Tensor
_getters: Any = Tensor  # Any: typing takes its descriptors for their values

# The C++ code of these methods reads memory without an operation that could be recorded.
_ASK_FOR_VALUES = {Tensor.numpy, Tensor.tolist, Tensor.__array__}
_ASK_FOR_MEMORY = {Tensor.data_ptr, Tensor.__reduce_ex__, Tensor.__reduce__, Tensor.share_memory_, Tensor.pin_memory}
_MOVES = {Tensor.to, Tensor.cpu}
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray}


class AsIfOnCpu(TorchFunctionMode):
    """Answers Python code that asks about the device, the values or the memory of a recorder's tensors."""

    def __init__(self, recorder: ConstructorRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._special: dict[Any, Callable[..., Any]] = {
            _getters.device.__get__: lambda tensor: torch.device("cpu"),
            _getters.is_meta.__get__: lambda tensor: False,
            _getters.is_cpu.__get__: lambda tensor: True,
            _getters.data.__set__: self._set_data,
            Tensor.new_tensor: self._new_tensor,
        }

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        if function in _FROM_DATA and arguments and isinstance(arguments[0], list | tuple):
            arguments = (self._with_values(arguments[0]), *arguments[1:])
        first = arguments[0] if arguments and isinstance(arguments[0], Tensor) else None
        if first is None or not self._knows(first):
            return self._call_with_own_devices(function, arguments, keywords)
        if function in self._special:
            return self._special[function](*arguments, **keywords)
        if function in _ASK_FOR_VALUES:
            return self._from_values(function, first, arguments[1:], keywords)
        if function in _ASK_FOR_MEMORY:
            raise RuntimeError(
                f"deferred_init: the constructor calls {function.__name__} on a tensor of shape {tuple(first.shape)}, "
                f"which has no memory yet: build this model without deferred_init"
            )
        if function in _MOVES:
            return self._move(function, arguments, keywords)
        return self._call_with_own_devices(function, arguments, keywords)

    def _knows(self, tensor: Tensor) -> bool:
        with NO_TORCH_FUNCTION():
            return self._recorder.knows(tensor)

    def _call_with_own_devices(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call ``function``, which makes real meta tensors if the constructor itself asks for the meta device."""
        device = keywords.get("device")
        if device is None or torch.device(device).type != "meta":
            check_device(device, function)
            return function(*arguments, **keywords)
        self._recorder.leave_meta_alone = True
        try:
            return function(*arguments, **keywords)
        finally:
            self._recorder.leave_meta_alone = False

    def _from_values(self, function: Any, tensor: Tensor, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        with NO_TORCH_FUNCTION():
            value = self._recorder.value(tensor).requires_grad_(tensor.requires_grad)
            result = function(value, *arguments, **keywords)
        if function is not Tensor.tolist:
            result.flags.writeable = False  # writes to the copy would be lost
        return result

    def _with_values(self, data: Any) -> Any:
        """Nested lists of numbers and tensors, with values in place of deferred tensors."""
        with NO_TORCH_FUNCTION():
            return pytree.tree_map(
                lambda one: self._recorder.value(one) if isinstance(one, Tensor) and self._knows(one) else one, data
            )

    def _new_tensor(self, own: Tensor, data: Any, *, dtype: torch.dtype | None = None, **keywords: Any) -> Tensor:
        return torch.tensor(self._with_values(data), dtype=dtype or own.dtype, **keywords)

    def _move(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run ``tensor.to(...)`` or ``tensor.cpu()``: a move to the CPU changes nothing."""
        own, *others = arguments
        if function is Tensor.cpu:
            return own
        devices = [leaf for leaf in (*others, *keywords.values()) if isinstance(leaf, torch.device | str)]
        if any(torch.device(device).type == "meta" for device in devices):
            with NO_DISPATCH_MODES():
                return torch.empty_like(own, device="meta")

        def stay(value: Any) -> Any:
            is_cpu = isinstance(value, torch.device | str) and torch.device(value).type == "cpu"
            return torch.device("meta") if is_cpu else value

        others, keywords = pytree.tree_map(stay, (others, keywords))
        return function(own, *others, **keywords)

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        """Run ``tensor.data = value``, which torch allows only between tensors of one device."""
        with NO_TORCH_FUNCTION():
            tensor.data = value if self._knows(value) else self._recorder.deferred(value)
