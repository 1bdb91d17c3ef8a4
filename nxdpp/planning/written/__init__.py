"""Programs, tables and JSON that a plan writes."""
