"""Traced values: proxies that record what code does with them, and their structure."""
