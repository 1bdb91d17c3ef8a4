"""What the benchmarks measure with, judged itself."""
