"""Functions of Llama models at the import paths of NeuronX Distributed."""

from nxdpp.overrides import transformer_overrides as transformer_overrides

__all__ = ["transformer_overrides"]


def __dir__() -> list[str]:
    return __all__
