"""``python -m nxdpp plan``: stages of a model configuration, without memory for weights."""
