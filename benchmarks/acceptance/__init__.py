"""The acceptance of a machine: exactness and times of every schedule on its devices."""
