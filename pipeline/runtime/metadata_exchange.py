"""Metadata exchange of a stage with its neighbours: layouts of the boundary tensors, once before the first step.

::

    source stages ── layouts: shapes, dtypes, strides ──▶ this stage ── layouts of its values ──▶ destination stages
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from nxdpp.pipeline.p2p.channel import Channel
from nxdpp.pipeline.p2p.layout import ValueLayout, layout_of, shared_memory
from nxdpp.pipeline.runtime.metadata_placeholder import metadata_placeholder
from nxdpp.pipeline.stages.split import StagePlan
from nxdpp.tracing.graph.checks import passes_on
from nxdpp.tracing.graph.errors import model_line


class MetadataExchange:
    """The part of one stage in the metadata exchange.

    Args:
        plan: the values that the stage sends and receives.
        channels_in: the channels to source stages.
        channels_out: the channels to destination stages.
        device: device of the stage.

    Attributes:
        placeholders: of received values of which only metadata are used, by name.
        sharing_memory: names of received values that share memory with others.
        is_received, is_sent: ``True`` after ``receive`` and ``send``, which a runner calls once.
    """

    def __init__(
        self, plan: StagePlan, channels_in: Sequence[Channel], channels_out: Sequence[Channel], device: torch.device
    ) -> None:
        self.placeholders: dict[str, Any] = {}
        self.sharing_memory: list[str] = []
        self._plan = plan
        self._channels_in = channels_in
        self._channels_out = channels_out
        self._device = device
        self.is_received = False
        self.is_sent = False

    def receive(self) -> None:
        """Receive the layouts of the source stages."""
        for channel in self._channels_in:
            channel.receive_metadata()
            boundary, layouts = channel.boundary, channel.boundary.layouts
            self.placeholders |= {
                name: metadata_placeholder(layouts[name], self._device) for name in boundary.metadata_only
            }
            self.sharing_memory += [name for name in boundary.values if layouts[name].shares_memory]
        self.is_received = True

    def send(self, made: Mapping[str, Any]) -> None:
        """Send the layouts of the values ``made`` by this stage to its destination stages."""
        plan = self._plan
        shared = shared_memory(made[name] for name in plan.sent)
        sent = {name: self._layout(name, made[name], shared) for name in plan.sent}
        only = {name: self._layout(name, made[name]) for name in plan.sent_metadata}
        for channel in self._channels_out:
            boundary = channel.boundary
            boundary.set_layouts({n: sent[n] for n in boundary.values} | {n: only[n] for n in boundary.metadata_only})
            channel.send_metadata()
        self.is_sent = True

    def _layout(self, name: str, value: Any, shared: Collection[int] = ()) -> ValueLayout:
        """The layout of the value ``name``. An error has the module or the line that makes it."""
        try:
            return layout_of(value, shared)
        except TypeError as error:
            node: Any = next(node for node in self._plan.nodes if node.name == name)
            while passes_on(node):
                node = node.args[0]
            place = f"by {node.target}" if node.op == "call_module" else f"at {model_line(node.stack_trace)}"
            raise TypeError(f"{error}\n  made {place}") from error
