"""All that reads code: its source, its names, and the frames that run it."""
