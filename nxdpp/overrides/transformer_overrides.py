"""Import path of NeuronX Distributed: ``apply_rotary_pos_emb``."""

from nxdpp.doors.nxd.attention import apply_rotary_pos_emb

__all__ = ["apply_rotary_pos_emb"]
