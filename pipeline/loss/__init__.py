"""Loss of a step, from those of its microbatches."""
