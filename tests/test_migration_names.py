"""Names of NeuronX Distributed's guides and of real scripts, with their printed arguments and defaults.

Each is imported at its own path, with ``neuronx_distributed`` replaced by ``nxdpp``.
"""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import init

from tests.support.dotted_names import imported

PAGE = (Path(__file__).parents[1] / "docs/migrating.md").read_text()

STATE = "parallel_layers.parallel_state"

# Paths below nxdpp, with the signature that a guide prints. Without one any signature will do.
OF_CHECKPOINTS = {
    "save_checkpoint": "(path, tag='', model=None, optimizer=None, scheduler=None, user_content=None, num_workers=8, "
    "use_xser=False, num_kept_ckpts=None, async_save=False, zero1_optimizer=False, use_zero1_dcp=False, "
    "avoid_saving_lower_precision_weights=False)",
    "load_checkpoint": "(path, tag=None, model=None, optimizer=None, scheduler=None, num_workers=8, strict=True, "
    "use_zero1_dcp=False)",
    "has_checkpoint": "(path)",
    "finalize_checkpoint": "()",
}

NAMES: Mapping[str, str | None] = {
    # The API guide.
    "parallel_state.initialize_model_parallel": "(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)",
    "parallel_state.get_data_parallel_size": "()",
    "parallel_state.get_tensor_model_parallel_size": "()",
    "parallel_state.get_tensor_model_parallel_rank": "()",
    "parallel_state.get_pipeline_model_parallel_size": "()",
    "parallel_state.get_pipeline_model_parallel_rank": "()",
    "parallel_state.get_data_parallel_rank": "()",
    "parallel_state.get_data_parallel_group": "(as_list=False)",
    "parallel_state.get_tensor_model_parallel_group": "(as_list=False)",
    "parallel_state.get_pipeline_model_parallel_group": "(as_list=False)",
    "parallel_state.move_model_to_device": "(model, device)",
    # NeuronX Distributed's order. The guide prints init_method, dtype and device: tests/tensor/test_embedding.py.
    "parallel_layers.ParallelEmbedding": "(num_embeddings, embedding_dim, padding_idx=None, max_norm=None, "
    "norm_type=2.0, scale_grad_by_freq=False, sparse=False, init_method=init.normal_, device=None, "
    "dtype=torch.float32, shard_across_embedding=False, pad=False, sequence_parallel_enabled=False, "
    "tensor_model_parallel_group=None)",
    "parallel_layers.ColumnParallelLinear": "(input_size, output_size, bias=True, gather_output=True, "
    "sequence_parallel_enabled=False, dtype=torch.float32, device=None)",
    # The guide prints device=False here; its text says that the default is the CPU, as of the other layers.
    "parallel_layers.RowParallelLinear": "(input_size, output_size, bias=True, input_is_parallel=False, "
    "sequence_parallel_enabled=False, dtype=torch.float32, device=None)",
    "parallel_layers.pad.pad_model": "(model, tp_degree, n_heads, wrapped_classes=(), pad_hook_fn=None)",
    "parallel_layers.pad.get_number_of_extra_heads": None,
    "parallel_layers.loss_functions.parallel_cross_entropy": "(parallel_logits, labels, label_smoothing=0.0)",
    "pipeline.NxDPPModel": "(module, transformer_layer_cls=None, num_microbatches=1, virtual_pipeline_size=1, "
    "output_loss_value_spec=None, return_mb_loss=False, broadcast_and_average_loss=False, pipeline_cuts=None, "
    "input_names=None, leaf_module_cls=None, autowrap_functions=None, autowrap_modules=None, tracer_cls=None, "
    "param_init_fn=None, trace_file_path=None, use_zero1_optimizer=False, auto_partition=False, "
    "deallocate_pipeline_outputs=False)",
    "pipeline.NxDPPModel.run_train": None,
    "pipeline.NxDPPModel.run_eval": None,
    "pipeline.NxDPPModel.local_named_parameters": None,
    "pipeline.NxDPPModel.local_named_modules": None,
    # The pipeline guide.
    "NxDPPModel": None,
    "pipeline.NxDPPModel.local_parameters": None,
    "pipeline.NxDPPModel.move_model_to_device": None,
    "utils.model_utils.init_on_device": "(device)",
    f"{STATE}.rmsg": "(msg)",
    "utils.logger.get_logger": "()",
    "parallel_layers.mappings": None,
    "parallel_layers.layers.ColumnParallelLinear.init_weight_cpu": None,
    "parallel_layers.layers.RowParallelLinear.init_weight_cpu": None,
    "parallel_layers.layers.ParallelEmbedding.init_weight_cpu": None,
    # The tensor-parallel guide.
    "parallel_state.get_data_parallel_world_size": "()",
    "parallel_state.get_tensor_parallel_size": "()",
    "parallel_layers.parallel_state": None,
    "parallel_layers.clip_grad_norm": "(parameters, max_norm)",
    "parallel_layers.move_model_to_device": "(model, device)",
    "parallel_layers.save": "(state_dict, save_dir, save_serially=True, save_xser=False, down_cast_bf16=False)",
    "parallel_layers.load": "(load_dir, model_or_optimizer=None, model_key='model', load_xser=False, sharded=True)",
    # Scripts.
    f"{STATE}.initialize_model_parallel": "(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)",
    f"{STATE}.destroy_model_parallel": "()",
    f"{STATE}.model_parallel_is_initialized": "()",
    f"{STATE}.get_data_parallel_replica_groups": "()",
    f"{STATE}.get_tensor_parallel_replica_groups": "()",
    f"{STATE}.get_tensor_model_parallel_replica_groups": "()",
    f"{STATE}.get_pipeline_model_parallel_replica_groups": "()",
    f"{STATE}.get_context_model_parallel_size": "()",
    f"{STATE}.get_context_model_parallel_rank": "()",
    f"{STATE}.get_context_model_parallel_group": "(as_list=False)",
    f"{STATE}.get_expert_model_parallel_size": "()",
    f"{STATE}.get_expert_model_parallel_rank": "()",
    f"{STATE}.get_expert_model_parallel_group": "(as_list=False)",
    f"{STATE}.get_expert_data_parallel_group": "(as_list=False)",
    f"{STATE}.get_tensor_model_parallel_src_rank": "()",
    f"{STATE}.get_data_parallel_src_rank": "()",
    f"{STATE}.get_world_group": "(as_list=False)",
    "parallel_layers.layers.ColumnParallelLinear": None,
    "parallel_layers.layers.RowParallelLinear": None,
    "parallel_layers.layers.ParallelEmbedding": None,
    "modules.qkv_linear.GQAQKVColumnParallelLinear": "(input_size, output_sizes, bias=True, gather_output=True, "
    "dtype=torch.float32, device=None, init_method=None, sequence_parallel_enabled=False, keep_master_weight=False, "
    "kv_size_multiplier=1, fuse_qkv=True)",
    "parallel_layers.utils.divide": "(numerator, denominator)",
    "parallel_layers.mappings.copy_to_tensor_model_parallel_region": None,
    "parallel_layers.mappings.gather_from_tensor_model_parallel_region": None,
    "parallel_layers.mappings.reduce_from_tensor_model_parallel_region": None,
    "parallel_layers.mappings.scatter_to_tensor_model_parallel_region": None,
    "parallel_layers.mappings.gather_from_sequence_parallel_region": None,
    "parallel_layers.mappings.scatter_to_sequence_parallel_region": None,
    "parallel_layers.mappings.reduce_scatter_to_sequence_parallel_region": None,
    "parallel_layers.grads.clip_grad_norm": "(parameters, max_norm, norm_type=2, zero1_optimizer=False, "
    "zero1_optimizer_groups=None, force_spmd=True)",
    "parallel_layers.grads.bucket_allreduce_gradients": None,
    "parallel_layers.random.model_parallel_xla_manual_seed": "(seed)",
    "parallel_layers.checkpointing.save": None,
    "parallel_layers.checkpointing.load": None,
    "utils.model_utils.move_model_to_device": "(model, device)",
    "utils.adamw_fp32_optim_params.AdamW_FP32OptimParams": None,
    "optimizer.NeuronZero1Optimizer": None,
    "optimizer.NeuronZero1Optimizer.init_zero": "(self)",
    "optimizer.NeuronZero1Optimizer.save_sharded_state_dict": "(self, output_dir, num_workers_per_step=8)",
    "optimizer.NeuronZero1Optimizer.load_sharded_state_dict": "(self, output_dir, num_workers_per_step=8)",
    "kernels.flash_attn.nki_flash_attn_func": "(q, k, v, lnc=1, dropout_p=0.0, softmax_scale=None, causal=True, "
    "mixed_precision=True, seed=None, hardware_type=None, transpose_nki_inputs=True)",
    "kernels.ring_attention_kernel.nki_ring_attn_func": "(q, k, v, rank_id, src_tgt_pairs, dropout_p=0.0, "
    "softmax_scale=None, causal=True, mixed_precision=True, seed=None)",
    "overrides.transformer_overrides.apply_rotary_pos_emb": "(q, k, cos, sin, position_ids, flash_attn, "
    "transpose_nki_inputs=True)",
    "utils.batch_utils.get_batch_on_this_context_parallel_rank": "(batch)",
    f"{STATE}.get_context_model_parallel_src_tgt_pairs": "()",
    "parallel_layers.utils.get_local_world_size": "()",
    "parallel_layers.utils.requires_init_pg_override": "()",
    "modules.moe.expert_mlps.ExpertMLPs": None,
    "modules.moe.loss_function.load_balancing_loss_func": "(router_logits, num_experts, top_k)",
    "modules.moe.model.MoE": "(router, expert_mlps)",
    "modules.moe.routing.RouterTopK": "(num_experts, top_k, hidden_size, sequence_parallel_enabled=False, "
    "sequence_dimension=None)",
    **{
        f"{package}{name}": signature
        for package in ("", "trainer.")
        for name, signature in {
            "neuronx_distributed_config": "(tensor_parallel_size=1, pipeline_parallel_size=1, expert_parallel_size=1, "
            "context_parallel_size=1, pipeline_config=None, optimizer_config=None, activation_checkpoint_config=None, "
            "pad_model=False, sequence_parallel=False, model_init_config=None, lora_config=None, "
            "mixed_precision_config=None, sequential_move_factor=11, lnc_size=1)",
            "initialize_parallel_model": "(nxd_config, model_fn, include_buffers=False)",
            "initialize_parallel_optimizer": "(nxd_config, optimizer_class, parameters)",
        }.items()
    },
    **{f"{package}{name}": signature for package in ("", "trainer.") for name, signature in OF_CHECKPOINTS.items()},
}

# Attributes of a wrapped model in scripts: tests/pipeline/test_nxd_meanings.py.


def printed(signature: str) -> list[tuple[str, Any]]:
    """Names and defaults of a printed signature; ``Parameter.empty`` without a default."""
    arguments = ast.parse(f"def f{signature}: pass").body[0].args  # type: ignore[attr-defined]
    known = {"torch": torch, "init": init}
    defaults = [eval(compile(ast.Expression(node), "", "eval"), known) for node in arguments.defaults]
    without = [inspect.Parameter.empty] * (len(arguments.args) - len(defaults))
    return list(zip([argument.arg for argument in arguments.args], [*without, *defaults], strict=True))


@pytest.mark.parametrize("path", NAMES)
def test_a_name_is_at_its_path_with_the_printed_arguments(path: str) -> None:
    found = imported(path)
    signature = NAMES[path]
    if signature is None:
        return
    parameters = list(inspect.signature(found).parameters.values())
    expected = printed(signature)
    assert [(one.name, one.default) for one in parameters[: len(expected)]] == expected
    # A script that gives the printed arguments by position or by name gives all that is needed.
    further = parameters[len(expected) :]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    assert all(one.default is not one.empty or one.kind in variadic for one in further)


def alternatives(name: str) -> list[str]:
    """Return the names that ``name`` of the page stands for, with ``{a,b}`` for either."""
    before, brace, rest = name.partition("{")
    inside, _, after = rest.partition("}")
    return [before + each + end for each in inside.split(",") for end in alternatives(after)] if brace else [name]


def test_the_page_has_each_name() -> None:
    listed = [name for span in re.findall(r"`([^`\n]+)`", PAGE) for name in alternatives(span)]
    names = [(path, path.rpartition(".")[2]) for path in NAMES]
    assert not [path for path, name in names if name not in listed and not any(one.endswith(path) for one in listed)]


def test_parallel_state_is_one_module_under_both_paths() -> None:
    one = importlib.import_module("nxdpp.parallel_state")
    assert one is importlib.import_module("nxdpp.ranks.parallel_state")
    assert imported("parallel_state") is one


def parents(path: str) -> list[str]:
    """Full names of the modules of a path."""
    parts = path.split(".")
    names = [".".join(("nxdpp", *parts[: count + 1])) for count in range(len(parts))]
    return [name for name in names if isinstance(imported(name.partition(".")[2]), ModuleType)]


def test_two_paths_give_one_object() -> None:
    assert imported("utils.model_utils.move_model_to_device") is imported("parallel_layers.move_model_to_device")
    assert imported("pipeline.NxDPPModel") is imported("NxDPPModel")


IN_A_NEW_PROCESS = """
import sys
import nxdpp, nxdpp.schedules.families.registry, nxdpp.pipeline, nxdpp.doors.nxd.logger
nxdpp.doors.nxd.logger.get_logger().warning("written")
assert "torch" not in sys.modules
"""


def test_a_module_is_an_attribute_before_any_import_of_it() -> None:
    """``import nxdpp`` is enough for ``nxdpp.parallel_layers.pad.pad_model``; the logger imports no torch."""
    modules = sorted({parent for path in NAMES for parent in parents(path)})
    assert "nxdpp.parallel_layers.loss_functions" in modules
    code = "\n".join([IN_A_NEW_PROCESS, *modules])
    ended = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True)
    # The triton of torch's CUDA builds may tell at its end of objects that it leaks.
    others = [line for line in ended.stderr.splitlines()[1:] if "nanobind" not in line and not line.startswith(" - ")]
    assert (ended.returncode, others) == (0, []), ended.stderr
    assert ended.stderr.splitlines()[0].endswith("WARNING written")
