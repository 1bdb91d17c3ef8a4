"""nnScaler's names over nxdpp's own; ``nxdpp.nnscaler`` lists the names that users import."""
