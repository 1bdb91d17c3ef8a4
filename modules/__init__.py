"""Modules of several tensor-parallel layers, at the import paths of NeuronX Distributed."""
