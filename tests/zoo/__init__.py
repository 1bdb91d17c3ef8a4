"""Tests of tools/zoo, on the types that a change is most likely to break."""
