"""Settings of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nxdpp.pipeline.stages.loss import LossGradient
from nxdpp.schedules.placement import ListedPlacement, Placement


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the steps of one signature on one rank.

    Attributes:
        placement: the rank of each stage.
        rank: this rank of the pipeline.
        microbatches: number of microbatches of a step.
        device: device of the stages.
        train: ``True`` if backwards follow. The last stage's first result is then the loss.
        keep_outputs: hold sent activations until their backward, as plain autograd would.
        in_flight: limit of microbatches in flight that a channel sends in one direction; ``None`` for none.
        in_order: ``True`` if the actions have the receives in the global order.
        loss_gradient: gives the gradient with which the backward of a microbatch's loss begins.
        forms: the form of each microbatch; empty where all have one. Microbatches of one form have equal shapes.
        graphs: the number of the graph of each form; empty where all have one.
    """

    placement: Placement | ListedPlacement
    rank: int
    microbatches: int
    device: torch.device
    train: bool
    keep_outputs: bool
    in_flight: int | None = None
    in_order: bool = False
    loss_gradient: LossGradient = torch.ones_like
    forms: Sequence[int] = ()
    graphs: Sequence[int] = ()
