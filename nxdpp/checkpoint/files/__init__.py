"""Safetensors files, read and written with little memory."""
