"""State dicts of parallel modules: their description, and what joins, deduplicates and divides them."""
