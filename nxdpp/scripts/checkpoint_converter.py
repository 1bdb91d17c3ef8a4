"""Import path of NeuronX Distributed for the base class of its checkpoint converters."""

from nxdpp.doors.nxd.converter.checkpoint_converter import CheckpointConverterBase

__all__ = ["CheckpointConverterBase"]
