"""``CheckpointConverterBase``: Hugging Face to the files of NxD's ranks and back, equal to the bit."""

import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import parallel_state
from nxdpp.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxdpp.parallel_layers import ColumnParallelLinear
from nxdpp.parallel_layers import load as load_state
from nxdpp.scripts.checkpoint_converter import CheckpointConverterBase
from tests.support.run_ranks import run_ranks

HIDDEN, HEADS, KV_HEADS, LAYERS = 48, 12, 2, 4
State = dict[str, torch.Tensor]


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(7)
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": LAYERS}
    config = LlamaConfig(vocab_size=64, hidden_size=HIDDEN, intermediate_size=32, **{**sizes, **changes})
    model = LlamaForCausalLM(config)
    model.bfloat16()
    return model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("huggingface")
    llama().save_pretrained(path)
    return path


def run(converter: CheckpointConverterBase, source: Path, output: Path, config: Path, **options: Any) -> None:
    words = {"input_dir": source, "output_dir": output, "config": config, "hw_backend": "trn1", **options}
    given = [
        word
        for name, value in words.items()
        for word in ([f"--{name}"] if name.startswith("convert") else [f"--{name}", str(value)])
    ]
    converter.run(converter.get_arg_parser().parse_args(given))


def load(path: Path) -> State:
    state: State = torch.load(path, weights_only=True)
    return state


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert {value.dtype for value in found.values()} == {torch.bfloat16}


def there_and_back(tmp_path: Path, state: Mapping[str, torch.Tensor], source: Path, **options: Any) -> Path:
    """Convert ``source`` to ranks and back, compare with ``state``, and return the directory of the ranks' files."""
    converter, ranks, config = CheckpointConverterBase(), tmp_path / "ranks", source / "config.json"
    run(converter, source, ranks, config, convert_from_full_state=True, **options)
    run(converter, ranks / "model", tmp_path / "whole", config, convert_to_full_state=True, **options)
    assert_equal(load(tmp_path / "whole/checkpoint.pt"), state)
    return ranks / "model"


LAYOUTS: dict[str, dict[str, Any]] = {
    "chunks": {"pp_size": 2, "virtual_pp_size": 2},
    "plain projections": {"tp_size": 2, "pp_size": 2},
    "copies on trn2": {"tp_size": 4, "qkv_linear": True, "kv_size_multiplier": 2, "hw_backend": "trn2"},
    "fused": {"tp_size": 4, "pp_size": 2, "qkv_linear": True, "fuse_qkv": True, "kv_size_multiplier": 2},
    "padded": {"tp_size": 8, "qkv_linear": True, "kv_size_multiplier": 4, "pad_attn_heads": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back_is_equal_to_the_bit(layout: str, directory: Path, tmp_path: Path) -> None:
    options = LAYOUTS[layout]
    files = there_and_back(tmp_path, llama().state_dict(), directory, **options)
    sizes = options.get("tp_size", 1), options.get("pp_size", 1)
    names = [f"dp_rank_00_tp_rank_{t:02d}_pp_rank_{p:02d}.pt" for t in range(sizes[0]) for p in range(sizes[1])]
    assert sorted(path.name for path in files.iterdir()) == sorted(names)


def test_a_rank_has_its_part_under_the_names_of_nxd(directory: Path, tmp_path: Path) -> None:
    whole = llama().state_dict()
    options = {"tp_size": 4, "pp_size": 2, "qkv_linear": True, "kv_size_multiplier": 2}
    files = there_and_back(tmp_path, whole, directory, **options)
    state = load(files / "dp_rank_00_tp_rank_01_pp_rank_01.pt")
    layer = "model.layers.2"
    assert sorted({name.split(".")[2] for name in state if ".layers." in name}) == ["2", "3"]
    assert "model.embed_tokens.weight" not in state
    assert torch.equal(state["model.norm.weight"], whole["model.norm.weight"])
    assert torch.equal(state["lm_head.weight"], whole["lm_head.weight"][16:32])
    # The second copy-less rank of trn1 has the second key-value head and the first block of its queries.
    assert torch.equal(
        state[f"{layer}.self_attn.qkv_proj.weight_k"], whole[f"{layer}.self_attn.k_proj.weight"].view(2, 4, HIDDEN)[1]
    )
    queries = whole[f"{layer}.self_attn.q_proj.weight"].view(HEADS, 4, HIDDEN)[6:9]
    assert torch.equal(state[f"{layer}.self_attn.qkv_proj.weight_q"], queries.reshape(12, HIDDEN))
    gate, up = (whole[f"{layer}.mlp.{name}_proj.weight"][8:16] for name in ("gate", "up"))
    assert torch.equal(state[f"{layer}.mlp.gate_up_proj.weight"], torch.cat([gate, up]))
    assert torch.equal(state[f"{layer}.mlp.down_proj.weight"], whole[f"{layer}.mlp.down_proj.weight"][:, 8:16])


def test_as_many_key_value_heads_as_queries(tmp_path: Path) -> None:
    model = llama(num_key_value_heads=HEADS, attention_bias=True)
    model.save_pretrained(tmp_path / "huggingface")
    options = {"tp_size": 2, "pp_size": 2, "coalesce_qkv": True}
    files = there_and_back(tmp_path, model.state_dict(), tmp_path / "huggingface", **options)
    state = load(files / "dp_rank_00_tp_rank_01_pp_rank_00.pt")
    attention, whole = "model.layers.0.self_attn", model.state_dict()
    parts = [whole[f"{attention}.{name}_proj.bias"][24:] for name in "qkv"]
    assert torch.equal(state[f"{attention}.qkv_proj.bias"], torch.cat(parts))
    assert torch.equal(state[f"{attention}.o_proj.bias"], whole[f"{attention}.o_proj.bias"])
    # The names tell that they are one weight.
    sizes = {"tp_size": 2, "pp_size": 2}
    run(
        CheckpointConverterBase(),
        files,
        tmp_path,
        tmp_path / "huggingface/config.json",
        convert_to_full_state=1,
        **sizes,
    )
    assert_equal(load(tmp_path / "checkpoint.pt"), whole)


def test_a_tied_head_is_on_the_last_stage(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "huggingface")
    assert "lm_head.weight" not in load_file(tmp_path / "huggingface/model.safetensors")
    files = there_and_back(tmp_path, model.state_dict(), tmp_path / "huggingface", tp_size=2, pp_size=2)
    first, last = (load(files / f"dp_rank_00_tp_rank_01_pp_rank_{stage:02d}.pt") for stage in (0, 1))
    assert torch.equal(last["lm_head.weight"], first["model.embed_tokens.weight"])
    assert "lm_head.weight" not in first


class Experts(CheckpointConverterBase):
    """A subclass as NxD's for Mixtral: experts become one weight, with the input before the output."""

    gate_up_proj_partition_dim = 2
    down_proj_partition_dim = 1

    def pre_process_full_state_before_tp_conversion(self, full_state: State, args: Any) -> State:
        for name in ("gate_proj", "up_proj", "down_proj"):
            experts = [full_state.pop(f"model.layers.0.experts.{number}.{name}") for number in range(4)]
            full_state[f"model.layers.0.mlp.expert_mlps.mlp_op.{name}.weight"] = torch.stack(experts)
        return full_state

    def post_process_full_state_after_tp_conversion(self, full_state: State, args: Any) -> State:
        for name in ("gate_proj", "up_proj", "down_proj"):
            for number, expert in enumerate(full_state.pop(f"model.layers.0.mlp.expert_mlps.mlp_op.{name}.weight")):
                full_state[f"model.layers.0.experts.{number}.{name}"] = expert
        return full_state


def test_experts_are_divided_over_ranks_of_their_own(directory: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    shapes = {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}
    state = {
        f"model.layers.0.experts.{number}.{name}": torch.randn(shape).bfloat16()
        for name, shape in shapes.items()
        for number in range(4)
    }
    state["model.norm.weight"] = torch.ones(6, dtype=torch.bfloat16)
    torch.save(state, tmp_path / "whole.pt")
    config, options = directory / "config.json", {"tp_size": 2, "ep_size": 2}
    run(Experts(), tmp_path / "whole.pt", tmp_path, config, convert_from_full_state=True, **options)
    second = load(tmp_path / "model/dp_rank_00_ep_rank_01_tp_rank_00_pp_rank_00.pt")
    assert {name: tuple(value.shape) for name, value in second.items()} == {
        "model.layers.0.mlp.expert_mlps.mlp_op.gate_up_proj.weight": (2, 6, 8),
        "model.layers.0.mlp.expert_mlps.mlp_op.down_proj.weight": (2, 4, 6),
    }
    run(Experts(), tmp_path / "model", tmp_path, config, convert_to_full_state=True, **options)
    assert_equal(load(tmp_path / "checkpoint.pt"), state)


def test_files_of_xser_are_read_without_torch_xla(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"tp_size": 2}
    files = there_and_back(tmp_path, llama().state_dict(), directory, **options)
    # What torch_xla's serialization writes: the class by its path, and a file for each tensor.
    module = ModuleType("torch_xla.utils.serialization")
    reference = type("TensorReference", (), {"__module__": module.__name__})
    vars(module)["TensorReference"] = reference
    for name in ("torch_xla", "torch_xla.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for path in files.iterdir():
        (tmp_path / "xser" / f"{path.name}.tensors").mkdir(parents=True)
        references = {}
        for number, (name, value) in enumerate(load(path).items()):
            torch.save(value, tmp_path / "xser" / f"{path.name}.tensors" / f"tensor_{number}.pt")
            references[name] = reference()
            references[name].tid = number
        torch.save(references, tmp_path / "xser" / path.name)
    monkeypatch.undo()
    converter = CheckpointConverterBase()
    run(converter, tmp_path / "xser", tmp_path / "plain", directory, convert_from_xser=True, **options)
    for path in files.iterdir():
        assert_equal(load(tmp_path / "plain/model" / path.name), load(path))


class RunsCode:
    def __reduce__(self) -> Any:
        return print, ("code of a file ran",)


def test_code_in_a_file_does_not_run(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tp_rank_00_pp_rank_00").mkdir()
    torch.save({"model": RunsCode()}, tmp_path / "tp_rank_00_pp_rank_00/checkpoint.pt", pickle_module=pickle)
    with pytest.raises(ValueError, match="has values that only code can restore, and a load runs none"):
        run(CheckpointConverterBase(), tmp_path, tmp_path, directory / "config.json", convert_to_full_state=True)
    assert "ran" not in capsys.readouterr().out


def test_copies_that_differ_are_refused(directory: Path, tmp_path: Path) -> None:
    options = {"tp_size": 4, "qkv_linear": True, "kv_size_multiplier": 2}
    files = there_and_back(tmp_path, llama().state_dict(), directory, **options)
    path = files / "dp_rank_00_tp_rank_03_pp_rank_00.pt"
    state = load(path)
    state["model.layers.1.self_attn.qkv_proj.weight_v"] += 1
    torch.save(state, path)
    message = r"the copies of model.layers.1.self_attn.v_proj.weight on the tensor ranks differ"
    with pytest.raises(ValueError, match=message):
        run(
            CheckpointConverterBase(), files, tmp_path, directory / "config.json", convert_to_full_state=True, **options
        )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "copies": ({"convert_from_full_state": 1, "kv_size_multiplier": 2}, "need --qkv_linear True"),
    "heads": ({"convert_from_full_state": 1, "coalesce_qkv": 1}, "has 2 and 12: give --qkv_linear True"),
    "sizes": ({"convert_from_full_state": 1, "tp_size": 5}, r"has 64 along dimension 0, which --tp_size 5 does not"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused(case: str, directory: Path, tmp_path: Path) -> None:
    options, message = REFUSED[case]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run(CheckpointConverterBase(), directory, tmp_path, directory / "config.json", **options)
    assert not list(tmp_path.iterdir())


def test_names_of_other_options_are_refused(directory: Path, tmp_path: Path) -> None:
    config, sizes = directory / "config.json", {"tp_size": 2}
    files = there_and_back(tmp_path, llama().state_dict(), directory, qkv_linear=True, **sizes)
    with pytest.raises(ValueError, match=r"qkv_proj\.weight_. does not fit the options: --qkv_linear and --fuse_qkv"):
        run(CheckpointConverterBase(), files, tmp_path, config, convert_to_full_state=True, **sizes)
    torch.save(load(files / "dp_rank_00_tp_rank_00_pp_rank_00.pt"), tmp_path / "fused.pt")
    with pytest.raises(ValueError, match=r"_proj.* is one weight of several projections"):
        run(CheckpointConverterBase(), tmp_path / "fused.pt", tmp_path, config, convert_from_full_state=True, **sizes)


def attention(rank: int, files: str, x: torch.Tensor) -> list[torch.Tensor]:
    """Query, key and value of this rank with the weights of NxD's file, and its part of the whole state's head."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    sizes = [HIDDEN, KV_HEADS * HIDDEN // HEADS]
    layer = GQAQKVColumnParallelLinear(HIDDEN, sizes, bias=False, gather_output=False, kv_size_multiplier=1)
    state = load(Path(files) / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")
    prefix = "model.layers.0.self_attn.qkv_proj."
    layer.load_state_dict(
        {name.removeprefix(prefix): value.float() for name, value in state.items() if name.startswith(prefix)}
    )
    model = nn.Module()
    model.lm_head = ColumnParallelLinear(HIDDEN, 64, bias=False, dtype=torch.bfloat16)
    load_state(Path(files).parents[1] / "whole/checkpoint.pt", model=model, model_key=None, sharded=False, strict=False)
    outputs = [*(output.detach() for output in layer(x)), model.lm_head.weight.detach()]
    parallel_state.destroy_model_parallel()
    return outputs


def test_a_rank_of_nxdpp_loads_its_file(directory: Path, tmp_path: Path) -> None:
    options = {"tp_size": 2, "qkv_linear": True, "hw_backend": "trn2"}
    files = there_and_back(tmp_path, llama().state_dict(), directory, **options)
    x = torch.randn(2, 3, HIDDEN)
    ranks = run_ranks(2, attention, str(files), x)
    for number, name in enumerate("qkv"):
        weight = llama().state_dict()[f"model.layers.0.self_attn.{name}_proj.weight"].float()
        torch.testing.assert_close(torch.cat([outputs[number] for outputs in ranks], -1), F.linear(x, weight))
    assert torch.equal(torch.cat([outputs[3] for outputs in ranks]), llama().lm_head.weight)
