"""Generation over the stages of a pipeline: one rank decides, and all ranks run forwards with caches of their own."""
