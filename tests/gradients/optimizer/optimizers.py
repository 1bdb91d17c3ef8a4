"""Optimizers as programs write them."""

from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Steps each element by the sign of an average."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                parameter -= group["lr"] * torch.lerp(parameter.grad, average, 0.9).sign()
                average.lerp_(parameter.grad, 0.01)


class Lamb(Optimizer):
    """Scales each update by the norm of its parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.norm() * parameter.grad / parameter.grad.norm()


class Unlucky(torch.optim.SGD):
    """Leaves out its step where a gradient is not finite."""

    def step(self, closure: Any = None) -> Any:
        if all(parameter.grad.isfinite().all() for group in self.param_groups for parameter in group["params"]):
            return super().step(closure)
        return None


class Sam(Optimizer):
    """Steps by the gradients at the worst point near the parameters."""

    def __init__(self, params: Any, base_optimizer: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        """Go to the worst point."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            self.state[parameter]["from"] = parameter.clone()
            parameter += self.param_groups[0]["rho"] * parameter.grad / norm

    @torch.no_grad()
    def second_step(self) -> None:
        """Go back, and step."""
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            parameter.copy_(self.state[parameter].pop("from"))
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()
