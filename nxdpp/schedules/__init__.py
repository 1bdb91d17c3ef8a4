"""Schedules as data: the order of the actions of each rank. Imports no torch."""
