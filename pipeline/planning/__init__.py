"""The command ``python -m nxdpp plan``: stages of a configuration, without memory."""
