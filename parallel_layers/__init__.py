"""Process groups, and what runs over them besides the pipeline."""
