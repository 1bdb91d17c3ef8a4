"""Metadata exchange of a stage with its neighbours: layouts of the boundary tensors, once before the first step.

::

    source stages ── layouts: shapes, dtypes, strides ──▶ this stage ── layouts of its values ──▶ destination stages
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nxdpp.ground.torch_names import WITHOUT_MEMORY
from nxdpp.pipeline.p2p.channel import Channel
from nxdpp.pipeline.p2p.layout import TensorLayout, ValueLayout, layout_of, shared_memory
from nxdpp.pipeline.stages.split import StagePlan
from nxdpp.tracing.graph.checks import passes_on
from nxdpp.tracing.graph.errors import model_line

# Operations that make a new tensor from the metadata of another.
_LIKE = {
    getattr(torch.ops.aten, name).default
    for made in ("empty", "full", "ones", "zeros")
    for name in (f"{made}_like", f"new_{made}")
}


class MetadataPlaceholder(torch.Tensor):
    """Tensor without data in place of a value of another stage.

    A use of its data raises ``RuntimeError``: a wrong assumption about a use must not become a wrong number.
    """

    @staticmethod
    def __new__(cls, layout: TensorLayout, device: torch.device) -> "MetadataPlaceholder":
        """An empty tensor of the layout's size, strides and dtype."""
        made: MetadataPlaceholder = WITHOUT_MEMORY(
            cls, layout.size, strides=layout.strides, dtype=layout.dtype, device=device
        )
        return made

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an option
        return f"MetadataPlaceholder(size={list(self.size())}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's names one argument otherwise
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Make tensors from the placeholder's metadata; refuse all other operations."""
        if function in _LIKE and not any(isinstance(argument, MetadataPlaceholder) for argument in args[1:]):
            source = args[0]
            meta = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device="meta")
            return function(meta, *args[1:], **{"device": source.device, **(kwargs or {})})
        raise RuntimeError(
            f"{function} asks for the data of a value that another stage computes; this stage has only its shape, "
            f"dtype and device. Make the module or function that does so a leaf together with its layer "
            f"(leaf_module_cls, autowrap_functions)."
        )


def metadata_placeholder(layout: ValueLayout, device: torch.device) -> Any:
    """A value of this layout whose tensors have no data."""
    return layout.build([MetadataPlaceholder(tensor, device) for tensor in layout.tensors])


class Incoming(NamedTuple):
    """A channel to a source stage, after the metadata exchange.

    Attributes:
        channel: it has the tensors of each microbatch.
        entering: numbers of the tensors that enter the autograd graph.
        values: the name and the layout of each value.
        are_tensors: ``True`` if each value is one tensor.
    """

    channel: Channel
    entering: list[int]
    values: list[tuple[str, ValueLayout]]
    are_tensors: bool

    @classmethod
    def over(cls, channel: Channel, train: bool) -> "Incoming":
        """Describe what comes over ``channel``, whose layouts are known; with ``train`` backwards follow."""
        boundary = channel.boundary
        values = [(name, boundary.layouts[name]) for name in boundary.values]
        activations = enumerate(boundary.activations) if train else ()
        entering = [number for number, entry in activations if entry.layout.requires_grad]
        return cls(channel, entering, values, all(isinstance(layout.skeleton, TensorLayout) for _, layout in values))


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
        self._plan, self._device = plan, device
        self._channels_in, self._channels_out = channels_in, channels_out
        self.is_received = self.is_sent = False

    def receive(self, train: bool) -> list[Incoming]:
        """Receive the layouts of the source stages; with ``train`` backwards follow."""
        for channel in self._channels_in:
            channel.receive_metadata()
            boundary, layouts = channel.boundary, channel.boundary.layouts
            self.placeholders |= {
                name: metadata_placeholder(layouts[name], self._device) for name in boundary.metadata_only
            }
            self.sharing_memory += [name for name in boundary.values if layouts[name].shares_memory]
        self.is_received = True
        return [Incoming.over(channel, train) for channel in self._channels_in]

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
