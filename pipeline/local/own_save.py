"""``save_pretrained`` of a model of which one rank holds a part."""

from typing import Any, NoReturn

from torch import nn

from nxdpp.tracing.modules.listings import modules


def refuse_own_save(root: nn.Module) -> None:
    """Make the ``save_pretrained`` of ``root``, and of the models in it, raise ``RuntimeError``."""
    for module in modules(root):
        if callable(getattr(type(module), "save_pretrained", None)):
            vars(module)["save_pretrained"] = _refuse


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "this model's own save_pretrained would need the parameters of all stages, and this rank holds those of its "
        "own: call nxdpp.save_pretrained(model, directory) on every rank."
    )
