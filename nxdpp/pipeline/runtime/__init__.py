"""Execution of steps on one rank."""
