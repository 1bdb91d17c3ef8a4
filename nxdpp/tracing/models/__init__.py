"""Models that tracing knows: Hugging Face's, their caches, images and losses."""
