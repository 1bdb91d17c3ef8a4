"""``load_pretrained(strict=False)``: values of ``from_pretrained``, and initial weights for the missing tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from nxdpp import LoadReport, NxDPPModel, deferred_init, load_pretrained, parallel_state, tensor_parallelize
from nxdpp.checkpoint.huggingface.mismatch import OtherShape
from tests.checkpoint.huggingface.checkpointed_models import differing
from tests.support.wrapped_models import bert, initialised, llama

pytestmark = pytest.mark.usefixtures("no_groups_left")

SEED = 77


def mixtral() -> Any:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    return transformers.MixtralConfig(**{**llama().to_dict(), "model_type": "mixtral", **sizes})


def gpt2() -> Any:
    tokens: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return transformers.GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=64, **tokens)


# The class that is saved, the class that is loaded, and their configuration.
CASES: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "backbone into a new head": ("BertModel", "BertForSequenceClassification", bert),
    "merged experts without their head": ("MixtralModel", "MixtralForCausalLM", mixtral),
    "a tied head left out": ("GPT2LMHeadModel", "GPT2ForSequenceClassification", gpt2),
}
HEAD: tuple[str, str, Callable[..., Any]] = ("LlamaForCausalLM", "LlamaForSequenceClassification", llama)


def wrap_as(rank: int, ranks: int, make: Callable[[], nn.Module], tensor: int = 1, **arguments: Any) -> NxDPPModel:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_debug(
        pipeline_model_parallel_rank=rank,
        pipeline_model_parallel_size=ranks,
        tensor_model_parallel_rank=tensor - 1,
        tensor_model_parallel_size=tensor,
    )
    torch.manual_seed(SEED)
    return NxDPPModel(make(), num_microbatches=ranks, **arguments)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def fresh(make: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    """The initial weights of a model on the meta device, over one rank."""
    model = wrap_as(0, 1, lambda: on_meta(make))
    model.materialise()
    return model.local_state_dict()


def eager(make: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    torch.manual_seed(SEED)
    return make().state_dict()


def saved(case: tuple[str, str, Callable[..., Any]], folder: Path) -> tuple[Callable[[], nn.Module], Any, Any]:
    """Save the first model of ``case``.

    Returns the constructor of the second one, that model as transformers loads it, and its information.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    first, second, config = case
    write(getattr(transformers, first)(config()), folder)
    kind: Any = getattr(transformers, second)
    return lambda: kind(config()), *kind.from_pretrained(folder, output_loading_info=True)


def write(model: Any, folder: Path) -> None:
    """Save ``model`` with random weights, also in norms and biases."""
    initialised(model, seed=3)
    model.save_pretrained(folder)


def same_kind(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether initial weights are as those of transformers: equal constants and zeros, about the same width."""
    if theirs.numel() < 2 or float(theirs.std()) == 0:
        return torch.equal(ours, theirs)
    wide = theirs.numel() < 64 or 0.6 < float(ours.std() / theirs.std()) < 1.6
    return wide and torch.equal(ours == 0, theirs == 0)


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_from_pretrained_and_of_a_fresh_model(case: str, tmp_path: Path) -> None:
    make, theirs, information = saved(CASES[case], tmp_path)
    expected, buffers = theirs.state_dict(), dict(theirs.named_buffers())
    of_meta, of_constructor = fresh(make), eager(make)
    places: list[tuple[int, int, Callable[[], nn.Module], dict[str, torch.Tensor]]] = [
        (0, 1, make, of_constructor),
        (1, 2, lambda: on_meta(make), of_meta),
        (1, 2, lambda: deferred_init(make), of_constructor),
    ]
    reports = set()
    for rank, ranks, build, initial in places:
        model = wrap_as(rank, ranks, build)
        report = load_pretrained(model, tmp_path, strict=False)
        reports.add(report)
        local = model.local_state_dict()
        wanted = {name: initial[name] if name in report.initialised else expected[name] for name in local}
        assert differing(local, wanted) == []
        assert [name for name in local if not same_kind(local[name], expected[name])] == []
        assert differing(dict(model.local_named_buffers()), buffers) == []
    (report,) = reports
    assert report
    assert set(report.missing) == information["missing_keys"]
    assert set(report.unexpected) == information["unexpected_keys"]
    assert report.mismatched == ()


def test_the_first_rank_prints_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, _, _ = saved(HEAD, tmp_path)
    for rank in range(2):
        model = wrap_as(rank, 2, lambda: on_meta(make))
        with pytest.raises(ValueError, match=r"1 missing, 1 unexpected(.|\n)*Or give strict=False"):
            load_pretrained(model, tmp_path)
        load_pretrained(model, tmp_path, strict=False)
        # Replicas compare the seed of initial weights.
        origin = f"initial weights from torch.initial_seed() {SEED}" if rank else None
        assert model.part.initial.origin == origin
    printed = capsys.readouterr().err

    assert printed.count(f"{tmp_path} has other tensors than this LlamaForSequenceClassification:\n") == 1
    assert "missing, with initial weights: score.weight" in printed
    assert "unexpected, left out: lm_head.weight" in printed


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_other_shapes_are_refused_or_initialised(tmp_path: Path) -> None:
    """A classifier of three labels into one of five, as ``ignore_mismatched_sizes`` of transformers."""

    def make(labels: int = 5) -> Any:
        return transformers.LlamaForSequenceClassification(llama(num_labels=labels))

    write(make(3), tmp_path)
    model = wrap_as(1, 2, lambda: on_meta(make))
    with pytest.raises(ValueError, match=r"score.weight \(\[3, 32\] in(.|\n)*ignore_mismatched_sizes=True"):
        load_pretrained(model, tmp_path, strict=False)
    assert all(parameter.is_meta for parameter in model.local_parameters())
    # The remedy of the message.
    report = load_pretrained(model, tmp_path, ignore_mismatched_sizes=True)
    assert report == LoadReport(mismatched=(OtherShape("score.weight", (3, 32), (5, 32)),))
    expected, theirs = make().from_pretrained(
        tmp_path, num_labels=5, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert set(report.mismatched) == theirs["mismatched_keys"]
    wanted = {**expected.state_dict(), "score.weight": fresh(make)["score.weight"]}
    assert differing(model.local_state_dict(), wanted) == []


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    saved(HEAD, tmp_path)
    change(tmp_path, lambda tensors: [tensors.update({f"other.{name}": tensors.pop(name)}) for name in list(tensors)])
    model = wrap_as(0, 1, lambda: transformers.LlamaForCausalLM(llama()))
    with pytest.raises(ValueError, match=rf"{tmp_path} has no tensor of this LlamaForCausalLM: its names are other\."):
        load_pretrained(model, tmp_path, strict=False)


class Unwritten(nn.Linear):
    """A layer that nothing initialises."""

    def reset_parameters(self) -> None:
        pass


def test_a_tensor_that_nothing_initialises_is_refused(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(Unwritten(8, 8) for _ in range(2)))

    save_file({"0.weight": torch.ones(8, 8), "0.bias": torch.ones(8)}, tmp_path / "model.safetensors")
    model = wrap_as(0, 1, lambda: on_meta(make), transformer_layer_cls=Unwritten)
    with pytest.raises(RuntimeError, match="left without values"):
        load_pretrained(model, tmp_path, strict=False)
    assert all(parameter.is_meta for parameter in model.local_parameters())


def test_a_divided_tensor_is_a_part_of_the_fresh_one(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return transformers.LlamaForCausalLM(llama())

    whole = fresh(make)
    write(transformers.LlamaModel(llama()), tmp_path)
    model = wrap_as(0, 1, lambda: tensor_parallelize(on_meta(make)), tensor=2)
    report = load_pretrained(model, tmp_path, strict=False)

    assert report == LoadReport(("lm_head.weight",))
    head = model.local_state_dict()["lm_head.weight"]
    assert torch.equal(head, whole["lm_head.weight"].chunk(2)[1])
