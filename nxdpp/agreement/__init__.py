"""Agreement of ranks: digests, comparisons with a message, and the verification of a step."""
