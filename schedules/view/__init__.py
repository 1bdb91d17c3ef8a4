"""Drawings, reports and commands for schedules and recorded steps."""
