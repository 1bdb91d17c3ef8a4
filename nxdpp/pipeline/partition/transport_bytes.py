"""Memory of the transport on a rank's device: communicators, and the messages that it holds.

On the CPU gloo's connections have buffers of kilobytes, and host memory frees a message at once. A link of shared
memory keeps slots for the messages that were in flight at once; only a plan for CPUs counts them (``rank_memory``).
"""

from collections.abc import Mapping

import torch
from torch import fx

from nxdpp.devices.kinds import kind_of
from nxdpp.ranks.transfer_groups import communicators
from nxdpp.tracing.costs.count import NodeCost
from nxdpp.tracing.graph.trace import TracedGraph

# A communicator of NCCL with its default buffers. The figure is published; it was not measured here.
COMMUNICATOR_BYTES = 100 * 2**20
# The most receives that a family posts ahead, and two sends in flight each way: their memory is freed late.
MESSAGES_HELD = 7 + 2 * 2


def transport_bytes(
    traced: TracedGraph,
    node_costs: Mapping[fx.Node, NodeCost],
    device: torch.device,
    ranks: int,
    replicas: int,
    tensor: int = 1,
) -> int:
    """Return the bytes that the transport takes on each rank.

    Args:
        traced: the graph of a microbatch.
        node_costs: cost of each of its nodes.
        device: device of the stages.
        ranks: number of ranks of the pipeline.
        replicas: number of data-parallel replicas.
        tensor: tensor-parallel size.
    """
    if kind_of(device.type).backend == "gloo":
        return 0
    message = largest_message(traced, node_costs)
    return communicators(ranks, replicas, tensor) * COMMUNICATOR_BYTES + MESSAGES_HELD * message


def largest_message(traced: TracedGraph, node_costs: Mapping[fx.Node, NodeCost]) -> int:
    """Return the bytes of the largest value that a layer sends to another stage."""
    layers = [node for node in node_costs if node.op == "call_module" and node.target in traced.layers]
    return max((node_costs[node].output_bytes for node in layers), default=0)
