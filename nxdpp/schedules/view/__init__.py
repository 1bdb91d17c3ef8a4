"""Drawings, tables and commands for schedules and recorded steps."""
