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

FEW = ("prompt", "prefix", "lora", "modules to save", "ia3", "lora of experts")
MORE = ("p-tuning", *(name for name in ADAPTERS if name not in FEW))
WAYS = pytest.mark.parametrize("names", [FEW, pytest.param(MORE, marks=pytest.mark.sweep)], ids=["few", "more"])
# Other ways of PEFT are loaded in test_an_adapter_of_peft_is_loaded.
ON_BASES = ["lora", "lora of embeddings", "modules to save", "ia3", "lora of experts", "lora of gpt2"]


def save_all(rank: int, folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        save_pretrained(wrap(adapted(name), 2), folder / name)


def configuration(folder: Path) -> dict[str, Any]:
    """The configuration of an adapter; PEFT writes its sets in any order."""
    fields = json.loads((folder / "adapter_config.json").read_text())
    return {name: sorted(value) if isinstance(value, list) else value for name, value in fields.items()}


def load_all(rank: int, folder: Path, names: list[str]) -> dict[str, list[str]]:
    """For each adapter, the local tensors that differ from those of the adapted model."""
    wrong = {}
    for name in names:
        expected = adapted(name).state_dict()
        model = wrap(adapted(name, seed=4), 2)
        before = dict(model.local_named_parameters())
        if any(parameter.requires_grad for parameter in before.values()):
            assert differing(dict(model.local_state_dict()), expected)
        load_pretrained(model, folder / name)
        assert all(parameter is before[key] for key, parameter in model.local_named_parameters())
        wrong[name] = differing(model.local_state_dict(), expected)
    return wrong


@WAYS
def test_peft_loads_a_saved_adapter(names: tuple[str, ...], tmp_path: Path) -> None:
    run_ranks(2, save_all, tmp_path / "ours", names)

    for name in names:
        model = adapted(name)
        model.save_pretrained(tmp_path / "theirs" / name)
        ours, theirs = tmp_path / "ours" / name, tmp_path / "theirs" / name
        saved, expected = tensors_in(ours), tensors_in(theirs)
        assert saved.keys() == expected.keys()
        assert differing(saved, expected) == []
        assert sorted(file.name for file in ours.iterdir()) == sorted(file.name for file in theirs.iterdir())
        assert configuration(ours) == configuration(theirs)
        loaded: Any = peft.PeftModel.from_pretrained(base(name), str(ours))
        # PEFT loads the output of an encoder, not its weights.
        assert name == "p-tuning" or differing(loaded.state_dict(), model.state_dict()) == []


@WAYS
def test_an_adapter_of_peft_is_loaded(names: tuple[str, ...], tmp_path: Path) -> None:
    # The output of an encoder of prompts is saved, and its weights cannot be loaded.
    loaded = [name for name in names if name != "p-tuning"]
    for name in loaded:
        adapted(name).save_pretrained(tmp_path / name)

    for wrong in run_ranks(2, load_all, tmp_path, loaded):
        assert wrong == {name: [] for name in loaded}


def test_an_encoder_of_prompts_cannot_be_loaded(tmp_path: Path) -> None:
    adapted("p-tuning").save_pretrained(tmp_path)

    with pytest.raises(ValueError, match=r"output of the prompt encoder of 'default'.*load_local_state_dict\(\)"):
        load_pretrained(wrap(adapted("p-tuning")), tmp_path)


def load_bases(rank: int, folder: Path) -> dict[str, list[list[str]]]:
    """For each adapter, the local tensors that differ after a load of the base model and of the adapter."""
    wrong = {}
    for name in ON_BASES:
        expected = adapted(name).state_dict()
        real = wrap(peft.get_peft_model(base(name, seed=9), ADAPTERS[name][1]()), 2)
        load_pretrained(real, folder / name / "adapter")
        load_pretrained(real, folder / name / "base")
        after_both = differing(real.local_state_dict(), expected)
        wrong[name] = [[key for key in after_both if "modules_to_save" not in key]]
        load_pretrained(real, folder / name / "adapter")
        wrong[name].append(differing(real.local_state_dict(), expected))
    return wrong


def save_bases(folder: Path, names: list[str]) -> None:
    for name in names:
        base(name).save_pretrained(folder / name / "base")
        adapted(name).save_pretrained(folder / name / "adapter")


def test_weights_of_the_base_model_are_loaded_under_the_adapter(tmp_path: Path) -> None:
    save_bases(tmp_path, ON_BASES)

    for wrong in run_ranks(2, load_bases, tmp_path):
        assert wrong == {name: [[], []] for name in ON_BASES}


def test_copies_beside_an_adapter_take_the_values_of_the_base_model(tmp_path: Path) -> None:
    base("modules to save").save_pretrained(tmp_path)
    model = adapted("modules to save")
    assert not torch.equal(model.state_dict()[COPY], base("modules to save").lm_head.weight)

    load_pretrained(wrap(model), tmp_path)

    assert torch.equal(model.state_dict()[COPY], base("modules to save").lm_head.weight)


def classifier() -> Any:
    """A Llama with a new head, which is trained beside its adapter."""
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"])
    return peft.get_peft_model(LlamaForSequenceClassification(base("lora").config), config)


def test_a_backbone_under_an_adapter_with_a_new_head(tmp_path: Path) -> None:
    base("lora").save_pretrained(tmp_path)
    expected: Any = LlamaForSequenceClassification.from_pretrained(tmp_path)
    scratch, real = classifier().state_dict(), classifier()
    with torch.device("meta"):
        on_meta = classifier()
    for model in (real, on_meta):
        report = load_pretrained(wrap(model), tmp_path, strict=False)
        assert report == LoadReport(("score.weight",), ("lm_head.weight",))
        loaded = model.get_base_model().model
        name = "layers.3.self_attn.q_proj.base_layer.weight"
        assert torch.equal(loaded.get_parameter(name), expected.model.layers[3].self_attn.q_proj.weight)
        heads = [tensor for name, tensor in model.state_dict().items() if ".score." in name]
        assert len(heads) == 2
        assert not any(tensor.is_meta for tensor in heads)
    assert differing({name: tensor for name, tensor in real.state_dict().items() if ".score." in name}, scratch) == []


COPY = "base_model.model.lm_head.modules_to_save.default.weight"


def load_on_meta(rank: int, folder: Path, names: list[str], order: list[str]) -> dict[str, list[str]]:
    wrong = {}
    for name in names:
        with torch.device("meta"):
            on_meta = peft.get_peft_model(base(name), ADAPTERS[name][1]())
        model = wrap(on_meta, 2)
        for part in order:
            load_pretrained(model, folder / name / part)
        wrong[name] = differing(model.local_state_dict(), adapted(name).state_dict())
        model.run_train(**inputs_for(name, batch("input_ids", "attention_mask", "labels")))
    return wrong


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["lora", "lora of t5"], ["base", "adapter"]),
        (["dora"], ["adapter", "base"]),
        pytest.param(["dora"], ["base", "adapter"], marks=pytest.mark.sweep),
        pytest.param(["lora", "lora of t5"], ["adapter", "base"], marks=pytest.mark.sweep),
    ],
)
def test_an_adapted_model_on_the_meta_device(names: list[str], order: list[str], tmp_path: Path) -> None:
    save_bases(tmp_path, names)

    for wrong in run_ranks(2, load_on_meta, tmp_path, names, order):
        assert wrong == {name: [] for name in names}


def test_an_adapter_of_another_form_is_refused(tmp_path: Path) -> None:
    adapted("lora").save_pretrained(tmp_path)
    wrapped = wrap(adapted("dora"))
    before = {name: tensor.clone() for name, tensor in wrapped.local_state_dict().items()}

    with pytest.raises(ValueError, match=r"8 missing, 0 unexpected.*\n.*lora_magnitude_vector(.|\n)*PeftConfig"):
        load_pretrained(wrapped, tmp_path)

    assert differing(wrapped.local_state_dict(), before) == []


def test_an_adapter_needs_an_adapted_model(tmp_path: Path) -> None:
    adapted("lora").save_pretrained(tmp_path)

    with pytest.raises(ValueError, match=r"adapter_config\.json.*LlamaForCausalLM is not a PeftModel.*get_peft_model"):
        load_pretrained(wrap(base("lora")), tmp_path)


def refused(model: Any, folder: Path) -> str:
    before = {file: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(ValueError, match=r"\S") as caught:
        save_pretrained(wrap(model), folder)
    assert {file: file.read_bytes() for file in folder.iterdir()} == before
    return str(caught.value)


def test_an_adapter_and_a_whole_model_have_directories_of_their_own(tmp_path: Path) -> None:
    whole, adapter = tmp_path / "whole", tmp_path / "adapter"
    save_pretrained(wrap(base("lora")), whole)
    save_pretrained(wrap(adapted("lora")), adapter)

    assert (
        f"{whole} holds a whole model (model.safetensors), and an adapter is saved: loads would find one of them. "
        f"Nothing was written. Give an adapter a directory of its own, or remove model.safetensors first."
    ) in refused(adapted("lora"), whole)
    assert (
        f"{adapter} holds an adapter (adapter_config.json and adapter_model.safetensors), and a whole model is saved"
    ) in refused(base("lora"), adapter)
    # The remedies of the messages.
    (whole / "model.safetensors").unlink()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).unlink()
    save_pretrained(wrap(adapted("lora")), whole)
    save_pretrained(wrap(base("lora")), adapter)
    model = wrap(adapted("lora", seed=4))
    load_pretrained(model, adapter)
    load_pretrained(model, whole)
    assert differing(model.local_state_dict(), adapted("lora").state_dict()) == []
    # An adapter of another name has a folder of its own.
    config = ADAPTERS["lora"][1]()
    save_pretrained(wrap(peft.get_peft_model(base("lora"), config, adapter_name="other")), adapter)
    load_pretrained(wrap(base("lora")), adapter)


def test_a_directory_without_the_base_model_names_the_adapter(tmp_path: Path) -> None:
    base("lora of gpt2").save_pretrained(tmp_path)

    with pytest.raises(ValueError, match=r"For an adapter, give a directory with adapter_config\.json"):
        load_pretrained(wrap(adapted("lora")), tmp_path)


def save_with_its_own_method(rank: int, folder: Path) -> list[str]:
    told = []
    for model in (adapted("lora"), base("lora")):
        wrap(model, 2)
        with pytest.raises(RuntimeError, match=r"\S") as caught:
            model.save_pretrained(folder)
        told.append(str(caught.value))
    return told


def test_the_method_of_the_model_names_ours(tmp_path: Path) -> None:
    for told in run_ranks(2, save_with_its_own_method, tmp_path):
        assert all("call nxdpp.save_pretrained(model, directory) on every rank" in message for message in told)
    assert not list(tmp_path.iterdir())


def test_the_method_of_a_model_of_one_stage_is_its_own(tmp_path: Path) -> None:
    model = adapted("lora")
    wrap(model)

    model.save_pretrained(tmp_path)

    assert differing(tensors_in(tmp_path), peft.get_peft_model_state_dict(model)) == []
