"""Outputs of the samples of a step, on all ranks of the pipeline."""
