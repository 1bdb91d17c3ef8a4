"""From a graph to stages to a running NxDPPModel."""
