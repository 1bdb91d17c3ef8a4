"""Split of a batch into microbatches, and concatenation of their outputs."""
