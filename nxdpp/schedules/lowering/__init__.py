"""Sends and receives derived from compute actions."""
