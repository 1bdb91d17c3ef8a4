"""Import path of NeuronX Distributed: ``nki_ring_attn_func``."""

from nxdpp.doors.nxd.attention import nki_ring_attn_func

__all__ = ["nki_ring_attn_func"]
