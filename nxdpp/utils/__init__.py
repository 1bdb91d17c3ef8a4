"""Import paths of NeuronX Distributed."""
