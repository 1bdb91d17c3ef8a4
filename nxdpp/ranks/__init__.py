"""Ranks of a job: process groups, the launcher, the store, the choice of devices, and the failure watch."""
