"""``MixedPrecisionAdam`` and ``MixedPrecisionAdamW``: float32 values and state for half parameters."""

from collections.abc import Iterable
from typing import Any

from nxdpp.gradients.optimizer.fp32_adamw import AdamW_FP32OptimParams


class MixedPrecisionAdamW(AdamW_FP32OptimParams):
    """``torch.optim.AdamW`` that steps a float32 copy of each half parameter, in its state under ``master``.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable, fused: as of
            ``torch.optim.AdamW``.

    Raises as ``AdamW`` does.
    """

    _DECAY = 1e-2

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        decay = self._DECAY if weight_decay is None else weight_decay
        flags: dict[str, Any] = {"maximize": maximize, "capturable": capturable, "differentiable": differentiable}
        super().__init__(params, lr, betas, eps, decay, amsgrad, foreach=foreach, fused=fused, **flags)


class MixedPrecisionAdam(MixedPrecisionAdamW):
    """``torch.optim.Adam`` that steps a float32 copy of each half parameter, in its state under ``master``.

    Arguments and errors are the ones of ``torch.optim.Adam``.
    """

    torch_class = "Adam"
    _DECAY = 0.0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a pickled or loaded state. ``AdamW`` would turn the decay into its own."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            group["decoupled_weight_decay"] = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, whose ``weight_decay`` is added to the gradients."""
        super().add_param_group(param_group)
        self.param_groups[-1]["decoupled_weight_decay"] = False
