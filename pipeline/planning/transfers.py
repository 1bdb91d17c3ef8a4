"""Seconds of messages between ranks: which link a group uses, and how long it takes."""

import math

from nxdpp.parallel_layers.collective_bytes import Kind, least_sent
from nxdpp.pipeline.planning.layer_times import BUCKET_BYTES
from nxdpp.pipeline.planning.layout import Layout
from nxdpp.pipeline.planning.machine import Link, Machine


def pipeline_link(machine: Machine, layout: Layout, source: int, destination: int) -> Link:
    """Return the link between two pipeline ranks; ranks of one stage are neighbours (``parallel_state``)."""
    block = layout.data * layout.tensor
    hosts = {rank * block // machine.devices_per_host for rank in (source, destination)}
    inside = len(hosts) == 1 and block <= machine.devices_per_host
    return machine.link if inside else machine.host_link


def data_link(machine: Machine, layout: Layout) -> Link:
    """Return the slowest link of a data-parallel group."""
    return machine.link_of(layout.data, layout.tensor)


def exchange_seconds(kind: Kind, whole: float, ranks: int, link: Link) -> float:
    """Return the seconds of collectives over ``ranks`` ranks for ``whole`` bytes, in buckets."""
    if ranks == 1 or not whole:
        return 0.0
    steps = (2 if kind == "all_reduce" else 1) * math.ceil(math.log2(ranks))
    return least_sent(kind, whole, ranks) / link.bytes_per_second + steps * link.latency * math.ceil(
        whole / BUCKET_BYTES
    )
