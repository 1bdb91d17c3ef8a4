"""Modules of several tensor-parallel layers."""
