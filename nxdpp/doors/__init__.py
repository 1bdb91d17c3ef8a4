"""Other libraries' names and arguments over nxdpp's own: NxD, nnScaler, OSLO, transformers."""
