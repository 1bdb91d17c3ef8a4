"""Channels between the stages of one rank and their source and destination stages."""

from functools import partial

from nxdpp.pipeline.p2p.channel import Channel, LocalChannel, Peer, RemoteChannel
from nxdpp.pipeline.p2p.layout import Boundary
from nxdpp.pipeline.p2p.transport import Transport
from nxdpp.pipeline.runtime.engine_config import EngineConfig
from nxdpp.pipeline.stages.split import StagePlan
from nxdpp.pipeline.timeline.recorder import RecordedChannel, StepRecorder


class StageChannels:
    """Channels of a rank, made by stage and form; two stages of this rank share one.

    Args:
        config: settings of the engine.
        transport: the transfers to other ranks; ``None`` when this rank has all stages.
        recorder: collects the times of transfers; ``None`` records nothing.
    """

    def __init__(self, config: EngineConfig, transport: Transport | None, recorder: StepRecorder | None) -> None:
        self._config = config
        self._transport = transport
        self._recorder = recorder
        self._peers: dict[int, Peer] = {}
        # By source stage, destination stage and form.
        self._local: dict[tuple[int, int, int], LocalChannel] = {}

    def incoming(self, plan: StagePlan, form: int) -> dict[int, Channel]:
        """Return the channel to each source stage of a stage, for microbatches of ``form``."""
        channels: dict[int, Channel] = {}
        for source in plan.source_stages:
            values = [name for name, stage in plan.received.items() if stage == source]
            metadata = [name for name, stage in plan.received_metadata.items() if stage == source]
            channels[source] = self._channel(Boundary(source, plan.stage, values, metadata), source, form)
        return channels

    def outgoing(self, plan: StagePlan, form: int) -> dict[int, Channel]:
        """Return the channel to each destination stage of a stage, for microbatches of ``form``."""
        channels: dict[int, Channel] = {}
        for destination in plan.destination_stages:
            values = [name for name, stages in plan.sent.items() if destination in stages]
            metadata = [name for name, stages in plan.sent_metadata.items() if destination in stages]
            boundary = Boundary(plan.stage, destination, values, metadata)
            channels[destination] = self._channel(boundary, destination, form)
        return channels

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
