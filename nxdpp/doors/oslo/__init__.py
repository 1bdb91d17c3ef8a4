"""OSLO's names over nxdpp's own; ``nxdpp.oslo`` lists the names that users import."""
