"""Import paths of the pipeline guide of NeuronX Distributed."""
