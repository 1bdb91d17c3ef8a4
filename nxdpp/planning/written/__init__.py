"""Programs that a plan writes."""
