"""Import path of NeuronX Distributed: ``nki_flash_attn_func``."""

from nxdpp.doors.nxd.attention import nki_flash_attn_func

__all__ = ["nki_flash_attn_func"]
