"""Adapters: PEFT loads what is saved here, and the other way round."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import LlamaForSequenceClassification

from nxdpp import LoadReport, load_pretrained, save_pretrained
from tests.checkpoint.huggingface.checkpointed_models import differing, tensors_in, wrap
from tests.support.adapted_models import ADAPTERS, adapted, base, inputs_for
from tests.support.run_ranks import run_ranks
from tests.support.wrapped_models import batch

NAMES = ("prefix", "modules to save", "lora of experts")
ON_BASES = NAMES[1:]
ON_META = "dora"
COPY = "base_model.model.lm_head.modules_to_save.default.weight"


def configuration(folder: Path) -> dict[str, Any]:
    """The configuration of an adapter; PEFT writes its sets in any order."""
    fields = json.loads((folder / "adapter_config.json").read_text())
    return {name: sorted(value) if isinstance(value, list) else value for name, value in fields.items()}


def save_and_load(rank: int, folder: Path) -> dict[str, list[str]]:
    """Save each adapter, and load those of PEFT; return the local tensors that differ from the adapted model's."""
    wrong = {}
    for name in NAMES:
        model = adapted(name)
        save_pretrained(wrap(model, 2), folder / "ours" / name)
        with pytest.raises(RuntimeError, match=r"call nxdpp\.save_pretrained\(model, directory\) on every rank"):
            model.save_pretrained(folder / "own")
        expected = adapted(name).state_dict()
        theirs = folder / "theirs" / name
        other = peft.get_peft_model(base(name, seed=9), ADAPTERS[name][1]()) if name in ON_BASES else adapted(name, 4)
        real = wrap(other, 2)
        before = dict(real.local_named_parameters())
        if any(parameter.requires_grad for parameter in before.values()):
            assert differing(dict(real.local_state_dict()), expected)
        load_pretrained(real, theirs)
        if name in ON_BASES:
            load_pretrained(real, folder / "base" / name)
            after_both = differing(real.local_state_dict(), expected)
            wrong[f"{name}, then its base"] = [key for key in after_both if "modules_to_save" not in key]
            # Copies beside an adapter take the values of the base model.
            if COPY in after_both:
                assert torch.equal(real.local_state_dict()[COPY].cpu(), base(name).lm_head.weight.cpu())
            load_pretrained(real, theirs)
        assert all(parameter is before[key] for key, parameter in real.local_named_parameters())
        wrong[name] = differing(real.local_state_dict(), expected)
    with torch.device("meta"):
        on_meta = peft.get_peft_model(base(ON_META), ADAPTERS[ON_META][1]())
    empty = wrap(on_meta, 2)
    for part in ("theirs", "base"):
        load_pretrained(empty, folder / part / ON_META)
    wrong[ON_META] = differing(empty.local_state_dict(), adapted(ON_META).state_dict())
    empty.move_model_to_device()
    empty.run_train(**inputs_for(ON_META, batch("input_ids", "attention_mask", "labels")))
    return wrong


def test_peft_loads_a_saved_adapter_and_those_of_peft_are_loaded(tmp_path: Path) -> None:
    for name in (*NAMES, ON_META):
        adapted(name).save_pretrained(tmp_path / "theirs" / name)
        base(name).save_pretrained(tmp_path / "base" / name)
    for wrong in run_ranks(2, save_and_load, tmp_path):
        assert len(wrong) == 6
        assert not any(wrong.values()), wrong

    assert not (tmp_path / "own").exists()
    for name in NAMES:
        ours, theirs = tmp_path / "ours" / name, tmp_path / "theirs" / name
        saved, expected = tensors_in(ours), tensors_in(theirs)
        assert saved.keys() == expected.keys()
        assert differing(saved, expected) == []
        assert {file.name for file in ours.iterdir()} == {file.name for file in theirs.iterdir()}
        assert configuration(ours) == configuration(theirs)
        loaded: Any = peft.PeftModel.from_pretrained(base(name), str(ours))
        assert differing(loaded.state_dict(), adapted(name).state_dict()) == []


def classifier() -> Any:
    """A Llama with a new head, which is trained beside its adapter."""
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"])
    return peft.get_peft_model(LlamaForSequenceClassification(base("lora").config), config)


def test_a_backbone_under_an_adapter_with_a_new_head(tmp_path: Path) -> None:
    base("lora").save_pretrained(tmp_path)
    with torch.device("meta"):
        model = classifier()
    report = load_pretrained(wrap(model), tmp_path, strict=False)
    assert report == LoadReport(("score.weight",), ("lm_head.weight",))
    name = "layers.3.self_attn.q_proj.base_layer.weight"
    loaded = model.get_base_model().model.get_parameter(name)
    assert torch.equal(loaded, base("lora").model.layers[3].self_attn.q_proj.weight)
    heads = [tensor for name, tensor in model.state_dict().items() if ".score." in name]
    assert len(heads) == 2
    assert not any(tensor.is_meta for tensor in heads)


def test_an_adapter_and_a_whole_model_have_directories_of_their_own(tmp_path: Path) -> None:
    models = {"whole": wrap(base("lora")), "adapter": wrap(adapted("lora"))}
    for name, model in models.items():
        save_pretrained(model, tmp_path / name)
    for held, saved, message in (
        ("whole", "adapter", r"holds a whole model \(model\.safetensors\), and an adapter is saved: loads"),
        ("adapter", "whole", r"holds an adapter \(adapter_config\.json and .*\), and a whole model is saved"),
    ):
        before = {file: file.read_bytes() for file in (tmp_path / held).iterdir()}
        with pytest.raises(ValueError, match=message):
            save_pretrained(models[saved], tmp_path / held)
        assert {file: file.read_bytes() for file in (tmp_path / held).iterdir()} == before
