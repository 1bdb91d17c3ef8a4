"""Devices: all that differs between the CPU and a device that runs after the host's calls."""

CUDA = "cuda"
"""The device type of CUDA, also of plans that name none."""
