"""Loss of a step, from the losses of its microbatches."""
