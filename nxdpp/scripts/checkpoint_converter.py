"""Import path of NeuronX Distributed for the base class of its checkpoint converters, and its command."""

import sys

from nxdpp.doors.nxd.converter.checkpoint_converter import CheckpointConverterBase

__all__ = ["CheckpointConverterBase"]

if __name__ == "__main__":
    converter = CheckpointConverterBase()
    try:
        converter.run(converter.get_arg_parser().parse_args())
    except (ValueError, OSError) as error:
        sys.exit(str(error))
