"""A run as it is seen from outside: metrics of each rank in files, and their views in a terminal and on a page."""
