"""Programs that developers run: sweeps over the types of transformers, and over training loops drawn at random."""
