"""The modules of a model: its layers, its spine, and what they keep or leave behind."""
