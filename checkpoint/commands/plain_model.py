"""A module that is not of transformers, by the names of its tensors alone."""

from collections.abc import Mapping

import torch
from torch import nn

from nxdpp.checkpoint.commands.meta_model import MetaModel
from nxdpp.checkpoint.distributed.model_state import model_tensors
from nxdpp.checkpoint.files.layout import Layout

_ADAPTED = ("base_model.model.", "base_model.prompt_encoder.")


def plain_model(layouts: Mapping[str, Layout], ties: Mapping[str, str], origin: object) -> MetaModel:
    """Return a model with tensors of ``layouts``, and those of ``ties`` under their other names.

    Raises ``ValueError`` for the tensors of a PEFT model, whose adapter has files of its own.
    """
    adapted = next((name for name in layouts if name.startswith(_ADAPTED)), None)
    if adapted is not None:
        raise ValueError(
            f"{origin} has the tensors of a PEFT model ({adapted}), and not the configuration of its adapter: load it "
            f"with nxdpp.load_checkpoint into the PeftModel, and write the adapter with nxdpp.save_pretrained."
        )
    module = nn.Module()
    made: dict[str, torch.Tensor] = {}
    for name in (*layouts, *ties):
        owner, key = module, name
        while "." in key:
            part, _, key = key.partition(".")
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        first = ties.get(name, name)
        if first not in made:
            made[first] = torch.empty(layouts[first].shape, dtype=layouts[first].dtype, device="meta")
        owner.register_buffer(key, made[first])
    return MetaModel(module, {}, model_tensors(module))
