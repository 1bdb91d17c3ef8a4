"""Conversion between Hugging Face's names and whole tensors and the files of NeuronX Distributed's ranks."""
