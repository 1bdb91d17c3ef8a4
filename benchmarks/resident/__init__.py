"""The parts of benchmarks/memory.py."""
