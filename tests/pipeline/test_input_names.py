"""Names of inputs: unknown and mistyped ones are refused, with a remedy that is followed here."""

import logging

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel
from nxdpp.pipeline.input_names import check_names
from tests.support.models import make, padded_batch
from tests.support.traced_models import PlainLayer, make_model


class Logits(nn.Module):
    """A model that returns a loss only with ``target``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(PlainLayer() for _ in range(2))

    def forward(self, pixels: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """Map ``(B, 4)`` to ``(B, 4)``, or to a loss."""
        for layer in self.layers:
            pixels = layer(pixels)
        return pixels if target is None else (pixels - target).square().mean()


def test_mistyped_names_that_keyword_arguments_would_swallow() -> None:
    model = make_model("llama", layers=2)
    for wrong, right in (("lables", "labels"), ("num_item_in_batch", "num_items_in_batch"), ("mask", "attention_mask")):
        rest = [name for name in ("input_ids", "labels", "attention_mask") if name != right]
        message = rf"takes no \['{wrong}'\] \(did you mean '{right}'\?\); its \*\*kwargs would drop it"
        with pytest.raises(ValueError, match=message):
            check_names(model, [wrong, *rest], "inputs")
        check_names(model, [right, *rest], "inputs")
    names = ["input_ids", "labels", "num_items_in_batch", "cu_seq_lens_q", "output_router_logits"]
    check_names(make_model("mixtral", layers=2), names, "inputs")


def test_a_keyword_that_no_forward_mentions_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("llama", layers=2)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            check_names(model, ["input_ids", "colour"], "inputs")
    text = "inputs: no forward of LlamaForCausalLM mentions colour: the model ignores it"
    assert [record.getMessage() for record in caplog.records] == [text]


@pytest.mark.usefixtures("one_rank")
def test_a_batch_that_is_given_as_one_input() -> None:
    model = NxDPPModel(make("llama", layers=2), num_microbatches=2)
    batch = padded_batch(4)
    with pytest.raises(ValueError, match=r"takes no 'batch', .* give them by name, run_train\(\*\*batch\)"):
        model.run_train(batch=batch)
    with pytest.raises(ValueError, match=r"no loss, only \['logits'\]. Pass the inputs .* one \(labels=...\)"):
        model.run_train(input_ids=batch["input_ids"])
    with pytest.raises(ValueError, match=r"does not divide into num_microbatches=2.*DataLoader\(..., drop_last=True"):
        model.run_train(**{name: value[:3] for name, value in batch.items()})
    model.run_train(**batch)


@pytest.mark.usefixtures("one_rank")
def test_calls_with_other_names_say_how_the_module_is_called() -> None:
    model = NxDPPModel(Logits(), num_microbatches=2)
    x = torch.ones(4, 4)
    with pytest.raises(TypeError, match=r"in this order: pixels, target.* Write run_train\(pixels=..., target=...\)"):
        model.run_train(x, x)
    with pytest.raises(TypeError, match=r"Write run_train\(\*\*batch\)"):
        model.run_eval({"pixels": x, "target": x})
    with pytest.raises(
        RuntimeError, match=r"a pipelined model cannot be called: use run_train\(pixels=..., target=...\)"
    ):
        model(x, target=x)
    with pytest.raises(ValueError, match=r"takes no \['pixel'\] \(did you mean 'pixels'\?\); it takes"):
        model.run_train(pixel=x, target=x)
    with pytest.raises(ValueError, match=r"a tensor \(2, 4\) of torch.float32.*pass the inputs for the loss"):
        model.run_train(pixels=x)
    assert model.run_eval(pixels=x).shape == (4, 4)
    model.run_train(pixels=x, target=x)
    with pytest.raises(ValueError, match=r"input_names: Logits.forward takes no \['targt'\] \(did you mean 'target'"):
        NxDPPModel(Logits(), input_names=["pixels", "targt"])
