"""Stage modules, made from the traced graph."""
