"""Methods of transformers' models that would silently take a part for the whole, refused on a divided model."""

from typing import Any, NoReturn

from torch import nn


def refuse_methods(model: nn.Module, divides_logits: bool) -> None:
    """Make ``save_pretrained`` and ``resize_token_embeddings`` of ``model``, and of models in it, raise.

    With ``divides_logits`` its ``generate`` raises too. All raise ``RuntimeError`` with what to call instead.
    """
    refused = {"save_pretrained": _save_pretrained, "resize_token_embeddings": _resize_token_embeddings}
    for module in model.modules():
        for name, refusal in refused.items():
            if callable(getattr(type(module), name, None)):
                vars(module)[name] = refusal
    if divides_logits and callable(getattr(type(model), "generate", None)):
        vars(model)["generate"] = _generate


def _save_pretrained(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "this model's own save_pretrained would write this rank's parts of the divided parameters: call "
        "nxdpp.save_pretrained(NxDPPModel(model, ...), directory) on every rank."
    )


def _resize_token_embeddings(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "resize_token_embeddings would give each tensor-parallel rank a whole vocabulary of its own: call it before "
        "tensor_parallelize(model)."
    )


def _generate(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "generate would choose tokens from this rank's part of the vocabulary: the head returns divided logits for the "
        "loss. Give tensor_parallelize(model, gather_logits=True), whose head returns all of them."
    )
