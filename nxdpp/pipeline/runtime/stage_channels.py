"""Settings of an engine, and the channels between the stages of its rank and their sources and destinations."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from nxdpp.pipeline.p2p.channel import Channel, LocalChannel, Peer, RemoteChannel
from nxdpp.pipeline.p2p.layout import Boundary
from nxdpp.pipeline.p2p.transport import Transport
from nxdpp.pipeline.stages.loss import LossGradient
from nxdpp.pipeline.stages.split import StagePlan
from nxdpp.pipeline.timeline.step_timeline import RecordedChannel, StepRecorder
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


class StageChannels:
    """Channels of a rank, made by stage and form; two stages of this rank share one.

    Args:
        config: settings of the engine.
        transport: the transfers to other ranks; ``None`` when this rank has all stages.
        recorder: collects the times of transfers; ``None`` records nothing.
    """

    def __init__(self, config: EngineConfig, transport: Transport | None, recorder: StepRecorder | None) -> None:
        self._config, self._transport, self._recorder = config, transport, recorder
        self._peers: dict[int, Peer] = {}
        # By source stage, destination stage and form.
        self._local: dict[tuple[int, int, int], LocalChannel] = {}

    def of_stage(self, plan: StagePlan, form: int) -> tuple[dict[int, Channel], dict[int, Channel]]:
        """Return the channels of a stage, to each source and to each destination, for microbatches of ``form``."""
        incoming: dict[int, Channel] = {}
        outgoing: dict[int, Channel] = {}
        for source in plan.source_stages:
            values = [name for name, stage in plan.received.items() if stage == source]
            metadata = [name for name, stage in plan.received_metadata.items() if stage == source]
            incoming[source] = self._channel(Boundary(source, plan.stage, values, metadata), source, form)
        for destination in plan.destination_stages:
            values = [name for name, stages in plan.sent.items() if destination in stages]
            metadata = [name for name, stages in plan.sent_metadata.items() if destination in stages]
            outgoing[destination] = self._channel(
                Boundary(plan.stage, destination, values, metadata), destination, form
            )
        return incoming, outgoing

    def _channel(self, boundary: Boundary, other: int, form: int) -> Channel:
        """Return the channel over ``boundary`` to stage ``other``."""
        config = self._config
        rank = config.placement.rank_of(other)
        if rank == config.rank:
            return self._local.setdefault((boundary.source, boundary.destination, form), LocalChannel(boundary))
        assert self._transport is not None, "other ranks have stages"
        chunks = config.placement.chunks
        if rank not in self._peers:
            self._peers[rank] = Peer(self._transport, rank, chunks * chunks, config.microbatches, config.in_order)
        pair = self._chunk(boundary.source) * chunks + self._chunk(boundary.destination)
        make_channel = RemoteChannel if self._recorder is None else partial(RecordedChannel, self._recorder)
        of_form = config.forms.count(form) if config.forms else config.microbatches
        return make_channel(boundary, self._peers[rank], pair, config.in_flight, form, of_form)

    def _chunk(self, stage: int) -> int:
        placement = self._config.placement
        return placement.stages_of(placement.rank_of(stage)).index(stage)
