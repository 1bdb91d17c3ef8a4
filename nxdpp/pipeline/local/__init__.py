"""The part of the model that this rank holds."""
