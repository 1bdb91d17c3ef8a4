"""The parts of benchmarks/gpu.py, each a program of ranks, and what starts them."""
