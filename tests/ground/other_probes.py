"""Probes of the private names of peft and einops."""

from unittest.mock import patch

import einops
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from nxdpp.ground import other_names as names
from tests.ground.probe import probe


@probe(names.ACTIVE_ADAPTER, names.DISABLE_ADAPTERS)
def _adapters() -> bool:
    options = LoraConfig(target_modules=["0"], init_lora_weights=False)
    model = get_peft_model(nn.Sequential(nn.Linear(2, 2)), options)
    model.add_adapter("ref", options)
    (layer,) = (each for each in model.modules() if isinstance(each, BaseTunerLayer))
    rows = torch.ones(1, 2)
    outputs = [model(rows)]
    names.ACTIVE_ADAPTER.set(layer, ["ref"])
    outputs.append(model(rows))
    names.DISABLE_ADAPTERS.set(layer, True)
    outputs.append(model(rows))
    with model.disable_adapter():
        is_plain = torch.equal(outputs[2], model(rows))
    return is_plain and not any(torch.equal(outputs[i], outputs[i - 1]) for i in range(3))


@probe(names.APPLY_RECIPE, names.TORCH_BACKEND)
def _recipes() -> bool:
    rows = torch.arange(4).view(2, 2)
    with patch(names.APPLY_RECIPE.path, side_effect=names.APPLY_RECIPE.found) as called:
        turned = einops.rearrange(rows, "a b -> b a")
    backend = called.call_args.args[0]
    return torch.equal(turned, rows.T) and isinstance(backend, names.TORCH_BACKEND.found)
