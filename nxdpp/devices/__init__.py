"""Devices: all that differs between the CPU and a device that runs after the host's calls."""
