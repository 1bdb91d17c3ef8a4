"""AdamW whose values and state are in float32 for parameters in half precision, without sharding."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from nxdpp.gradients.gradient_dtype import master_dtype, take_changes

_MASTER = "master"


class AdamW_FP32OptimParams(AdamW):
    """``torch.optim.AdamW`` with a float32 copy of each half parameter, in its state under ``master``.

    Half parameters get the rounded copy after each step. Values that a program loads into a parameter are taken over.
    Parameters in float32 are stepped as by ``AdamW``.

    Args:
        params, options: as of ``torch.optim.AdamW``.
        correct_bias: ``True``.
        no_deprecation_warning: no meaning here: there is no such warning.

    Attributes:
        torch_class: name of the class of ``torch.optim`` whose steps it makes, which a checkpoint has.

    Raises ``ValueError`` for ``correct_bias=False``, and as ``AdamW`` does.
    """

    torch_class = "AdamW"

    def __init__(
        self,
        params: Iterable[Any],
        *positional: Any,
        correct_bias: bool = True,
        no_deprecation_warning: bool = True,
        **options: Any,
    ) -> None:
        if not correct_bias:
            raise ValueError("correct_bias=False is not supported: AdamW corrects the bias of its averages.")
        super().__init__(params, *positional, **options)
        # A scaler unscales the gradients itself: the fused kernel would unscale the copies' gradients.
        self._step_supports_amp_scaling = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the float32 values, and round them into the parameters; not collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if all(master_dtype(parameter.dtype) == parameter.dtype for parameter in stepped):
            super().step()
            return loss
        with torch.no_grad():
            twins = {parameter: self._twin(parameter) for parameter in stepped}
            base = AdamW(
                [{**group, "params": [twins[p] for p in group["params"] if p in twins]} for group in self.param_groups]
            )
            for parameter, twin in twins.items():
                own = {key: value for key, value in self.state[parameter].items() if key != _MASTER}
                if own:
                    base.state[twin] = own
            base.step()
            for parameter, twin in twins.items():
                self.state[parameter] = base.state[twin]
                if twin is not parameter:
                    self.state[parameter][_MASTER] = twin.detach()
                    parameter.copy_(twin)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as ``AdamW`` does, and keep float32 where ``AdamW`` would round to the dtype of the parameter."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    self.state[parameter][key] = value.to(
                        device=parameter.device, dtype=master_dtype(parameter.dtype), copy=True
                    )

    def _twin(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the float32 values of a half ``parameter`` with its gradient; others are returned as they are."""
        dtype = master_dtype(parameter.dtype)
        if dtype == parameter.dtype:
            return parameter
        master = self.state[parameter].get(_MASTER)
        if master is None:
            master = parameter.detach().to(dtype)
        else:
            take_changes(master, parameter.detach())
        twin = nn.Parameter(master)
        assert parameter.grad is not None, "those without are not stepped"
        twin.grad = parameter.grad.to(dtype)
        return twin
