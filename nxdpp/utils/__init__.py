"""Import paths that the pipeline guide prints."""
