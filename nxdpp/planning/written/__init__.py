"""What a plan writes: programs, tables and JSON."""
