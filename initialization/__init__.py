"""A model without memory, and how what is local of it gets its values."""
