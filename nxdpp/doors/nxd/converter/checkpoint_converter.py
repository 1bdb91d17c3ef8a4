"""CheckpointConverterBase: whole tensors of Hugging Face's names to the files of NxD's ranks, and back.

::

    convert_from_full_state    model.safetensors ─▶ model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt of each rank
    convert_to_full_state      the ranks' files ─▶ checkpoint.pt
"""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from nxdpp.checkpoint.files.rank_file import FILE, file_of_rank, read_rank, trainer_name
from nxdpp.checkpoint.huggingface.read_directory import stored_tensors
from nxdpp.doors.nxd.converter import options
from nxdpp.doors.nxd.converter.tensor_division import TensorDivision
from nxdpp.pipeline.partition.partition import even_cuts, stages_of_layers
from nxdpp.tensor.rank_files import read_file, write_file

State = dict[str, torch.Tensor]


class CheckpointConverterBase:
    """Converts a model between one state of whole tensors and the states of NxD's ranks; runs in one process.

    A subclass names the dimensions along which its model's tensors are divided, and may change the whole state before
    and after: ``pre_process_full_state_before_tp_conversion``, ``post_process_full_state_after_tp_conversion``.
    Names, defaults and files are NeuronX Distributed's. Files are read with ``weights_only=True``, files with xser too.

    Attributes:
        attribute_map: names of the configuration for standard ones; ``a.b`` is the entry ``b`` of ``a``.
        embedding_partition_dim, qkv_partition_dim, gate_up_proj_partition_dim, down_proj_partition_dim,
            o_proj_partition_dim: divided dimension of these weights.
        layer_name_pattern: pattern whose first group is the name of a layer.
    """

    attribute_map: ClassVar[dict[str, str]] = {}
    embedding_partition_dim = 0
    qkv_partition_dim = 0
    gate_up_proj_partition_dim = 0
    down_proj_partition_dim = 1
    o_proj_partition_dim = 1
    layer_name_pattern = r"^(model\.layers\.\d+)"

    def get_arg_parser(self) -> argparse.ArgumentParser:
        """Return the parser of the options; a subclass may add its own."""
        return options.make_parser()

    def run(self, args: argparse.Namespace) -> None:
        """Convert as ``args`` tell. Raises ``ValueError`` for options and tensors that do not fit; see ``options``."""
        options.check(args)
        if args.convert_from_full_state:
            self.convert_from_full_state(args)
        elif args.convert_to_full_state:
            self.convert_to_full_state(args)
        else:
            self.convert_from_xser(args)

    def convert_from_full_state(self, args: argparse.Namespace) -> None:
        """Write the file of each rank, in ``output_dir/model``."""
        division = self._division(args)
        state = self.pre_process_full_state_before_tp_conversion(self.load_full_state(args), args)
        stages = self._stages(state, args)
        for pipeline in range(args.pp_size):
            of_rank = {name: each for name, each in state.items() if self._is_on(name, pipeline, stages, args)}
            for expert in range(args.ep_size):
                for tensor in range(args.tp_size):
                    part = division.of_rank(of_rank, tensor, expert)
                    self.save_partial_no_xser(args, part, tensor, pipeline, expert)

    def convert_to_full_state(self, args: argparse.Namespace) -> None:
        """Write the whole state of the ranks' files, as ``output_dir/checkpoint.pt``."""
        self.save_full(args, self.merge_tp_checkpoints(args))

    def convert_from_xser(self, args: argparse.Namespace) -> None:
        """Write the ranks' files of xser as plain ones."""
        for tensor in range(args.tp_size):
            for pipeline in range(args.pp_size):
                for expert in range(args.ep_size):
                    state = self.load_partial_no_xser(args, tensor, pipeline, expert)
                    self.save_partial_no_xser(args, state, tensor, pipeline, expert)

    def merge_tp_checkpoints(self, args: argparse.Namespace) -> State:
        """Return the whole state of the ranks' files."""
        division = self._division(args)
        state: State = {}
        for pipeline in range(args.pp_size):
            experts = range(args.ep_size)
            parts = [
                [self.load_partial_no_xser(args, tensor, pipeline, expert) for expert in experts]
                for tensor in range(args.tp_size)
            ]
            for name, whole in division.whole(parts).items():
                # A tensor of several stages, such as a rotary table, is taken from the first.
                state.setdefault(name, whole)
        return self.post_process_full_state_after_tp_conversion(state, args)

    def pre_process_full_state_before_tp_conversion(self, full_state: State, args: argparse.Namespace) -> State:
        """Return the whole state that is divided; a subclass overrides it."""
        return full_state

    def post_process_full_state_after_tp_conversion(self, full_state: State, args: argparse.Namespace) -> State:
        """Return the whole state that is written; a subclass overrides it."""
        return full_state

    def get_partition_dim(self, name: str) -> int:
        """Return the divided dimension of a weight. Raises ``ValueError`` for one that each rank has whole."""
        if any(part in name for part in ("embed_tokens", "lm_head", "wte")):
            return self.embedding_partition_dim
        if self.is_qkv_weight(name):
            return self.qkv_partition_dim
        if any(part in name for part in ("gate_proj", "up_proj", "gate_up_proj")):
            return self.gate_up_proj_partition_dim
        if "down_proj" in name:
            return self.down_proj_partition_dim
        if "o_proj" in name:
            return self.o_proj_partition_dim
        raise ValueError(f"{name} is not known as a divided weight: override get_partition_dim.")

    def is_qkv_weight(self, name: str) -> bool:
        """Return whether ``name`` is a query, key or value projection."""
        return any(part in name for part in ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value"))

    def get_hf_to_nxd_model_keys(self, qkv_linear: bool = True, is_gqa: bool = True) -> tuple[dict[str, str], ...]:
        """Return the ends of names of query, key and value, from Hugging Face to NxD and back."""
        to_nxd = {
            f"{each}_proj.{kind}": f"qkv_proj.{kind}_{each}" if qkv_linear else f"{each}_proj.{kind}"
            for each in ("q", "k", "v")
            for kind in ("weight", "bias")
        }
        return to_nxd, {nxd: name for name, nxd in to_nxd.items()}

    def get_fused_qkv_key(self) -> str:
        """Return the end of the name of query, key and value in one weight."""
        return "qkv_proj.weight_qkv"

    def load_full_state(self, args: argparse.Namespace) -> State:
        """Return the tensors of a Hugging Face directory, or of a file of ``torch.save``, on the CPU.

        Where the configuration ties the head to the embedding, ``lm_head.weight`` is the embedding.
        """
        path = Path(args.input_dir)
        if path.is_dir() and not (path / FILE).is_file():
            state = {name: stored.read() for name, stored in stored_tensors(path).items()}
        else:
            state = read_file(path / FILE if path.is_dir() else path, in_file=True)
        embedding = [name for name in state if name.endswith((".embed_tokens.weight", ".wte.weight"))]
        if embedding and _config(args).get("tie_word_embeddings"):
            state.setdefault("lm_head.weight", state[embedding[0]])
        return state

    def save_full(self, args: argparse.Namespace, full_state: State) -> None:
        """Write the whole state."""
        write_file(Path(args.output_dir) / FILE, full_state)

    def get_input_filename(
        self, args: argparse.Namespace, tp_rank: int, pp_rank: int, ep_rank: int = 0, xser: bool = False
    ) -> str:
        """Return the file of a rank in ``input_dir``. Raises ``FileNotFoundError``."""
        return str(file_of_rank(Path(args.input_dir), tp_rank, pp_rank, ep_rank))

    def get_output_filename(
        self, args: argparse.Namespace, tp_rank: int, pp_rank: int, ep_rank: int = 0, xser: bool = False
    ) -> str:
        """Return the file of a rank that is written."""
        name = trainer_name(tp_rank, pp_rank, ep_rank if args.ep_size > 1 else None)
        return str(Path(args.output_dir) / "model" / name)

    def load_partial_no_xser(self, args: argparse.Namespace, tp_rank: int, pp_rank: int, ep_rank: int = 0) -> State:
        """Return the state of a rank."""
        return read_rank(Path(self.get_input_filename(args, tp_rank, pp_rank, ep_rank)), args.model_key)

    def save_partial_no_xser(
        self, args: argparse.Namespace, partial_state: State, tp_rank: int, pp_rank: int, ep_rank: int = 0
    ) -> None:
        """Write the state of a rank."""
        write_file(Path(self.get_output_filename(args, tp_rank, pp_rank, ep_rank)), partial_state)

    def _get_config_value(self, config: Mapping[str, Any], key: str) -> Any:
        """Return an entry of ``config`` by its standard name. Raises ``KeyError`` for one that it lacks."""
        if key in config:
            return config[key]
        value: Any = config
        for name in self.attribute_map.get(key, key).split("."):
            if not isinstance(value, Mapping) or name not in value:
                raise KeyError(f"the configuration has no {key}; attribute_map may name another entry for it.")
            value = value[name]
        return value

    def _division(self, args: argparse.Namespace) -> TensorDivision:
        config = _config(args)
        query_heads = self._get_config_value(config, "num_attention_heads")
        try:
            kv_heads = self._get_config_value(config, "num_key_value_heads")
        except KeyError:
            kv_heads = query_heads
        return TensorDivision(self, args, query_heads, kv_heads)

    def _stages(self, state: State, args: argparse.Namespace) -> dict[str, int]:
        """The stage of each layer; earlier stages have fewer where they do not divide."""
        found = {match[1] for name in state if (match := re.match(self.layer_name_pattern, name))}
        layers = sorted(found, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
        if not layers:
            raise ValueError(
                f"no tensor of {args.input_dir} has a name of {self.layer_name_pattern!r}: set layer_name_pattern."
            )
        return stages_of_layers(even_cuts(layers, args.pp_size * args.virtual_pp_size), layers)

    def _is_on(self, name: str, pipeline: int, stages: Mapping[str, int], args: argparse.Namespace) -> bool:
        """Return whether a pipeline rank has the tensor ``name``."""
        if match := re.match(self.layer_name_pattern, name):
            return bool(stages[match[1]] % args.pp_size == pipeline)
        if "embed_tokens" in name or "wte" in name:
            return pipeline == 0
        if any(part in name for part in ("lm_head", "model.norm.weight", "norm_f.weight")):
            return bool(pipeline == args.pp_size - 1)
        return True


def _config(args: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(Path(args.config).read_text(encoding="utf-8"))
    return config
