"""Assignment of layers, graph nodes and parameters to stages."""
