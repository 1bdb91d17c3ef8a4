"""The trainer API of NeuronX Distributed over nxdpp's own; ``nxdpp.trainer`` lists the names that users import."""
