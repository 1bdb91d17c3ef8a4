"""Speed of this machine, measured and kept in a file."""
