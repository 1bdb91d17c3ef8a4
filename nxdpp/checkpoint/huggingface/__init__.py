"""Hugging Face directories: names and layouts of their tensors, and which rank reads or writes them."""
