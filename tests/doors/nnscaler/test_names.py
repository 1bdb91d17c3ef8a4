"""Every name, argument and default of nnScaler's page, and our page, which tells what becomes of each."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from nxdpp import nnscaler
from nxdpp.doors.nnscaler.policies import POLICIES
from nxdpp.nnscaler.runtime.f16_optimizer import MixedPrecisionAdamW
from nxdpp.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams

PAGE = (Path(__file__).parents[3] / "docs/nnscaler.md").read_text()

# As the page prints them. Arguments that it prints without a default and leaves out in calls have the default None.
SIGNATURES = {
    "parallelize": "(module_or_module_class, dummy_forward_args, pas_policy, compute_config, *, "
    "gen_savedir='./.nnscaler', reuse=ReuseType.MATCH, instance_name=None, load_module=True, module_dtype=None, "
    "module_fn=None, init_module_params=True, broadcast_strategy='none')",
    "build_optimizer": "(module, optimizer_fn, compute_config=None, **kwargs)",
    "merge_state_dicts": "(module_state_dicts, optimizer_state_dicts=None)",
    "load_merged_state_dicts": "(module, module_state_dict, optimizer=None, optimizer_state_dict=None, *, device=None)",
    "load_merged_state_dict": "(module, module_state_dict, optimizer=None, optimizer_state_dict=None, *, device=None)",
    "deduped_state_dict": "(module, optimizer=None)",
    "deduped_state_dicts": "(module, optimizer=None)",
    "load_deduped_state_dict": "(module, module_state_dict, optimizer=None, optimizer_state_dict=None, *, device=None)",
    "load_sharded_state_dict": "(module, module_state_dict, optimizer=None, optimizer_state_dict=None, *, device=None)",
    "broadcast_weights": "(module, stride_size=None)",
    "init": "()",
    "uninit": "()",
    "register_op": "(annotation, name=None, code_impl_pattern='import', emit_fn=None, transform_rules=None, "
    "input_gen_fn=None)",
    "sync_grad_when": "(cond)",
    "ParallelModule.__init__": "(self, init_params=True)",
    "ParallelModule.train_step": "(self, samples, is_dummy_batch=None, scale_fn=None)",
    "ParallelModule.infer_step": "(self, samples)",
    "ParallelModule.parameters_for_optimizer": "(self)",
    "ParallelModule.gather_params": "(self)",
    "ParallelOptimizer.sync_shard_grad": "(self)",
    "ParallelOptimizer.scale_grads": "(self, scale)",
    "ParallelOptimizer.clip_gnorm": "(self, max_norm=None)",
    "ParallelOptimizer.register_reducer_pre_hook": "(self, fn)",
    "ParallelOptimizer.register_reducer_post_hook": "(self, fn)",
    "ComputeConfig.get_sync_group": "(self)",
}

ATTRIBUTES = (
    "ComputeConfig.gpu_config",
    "ComputeConfig.graph_config",
    "ParallelOptimizer._non_parallel_module_reducer",
)


def found(path: str) -> object:
    value: object = nnscaler
    for part in path.split("."):
        value = getattr(value, part)
    return value


def plain(signature: inspect.Signature) -> str:
    """Return the signature without annotations, and with the names of members of enumerations."""
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    text = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return re.sub(r"<(\w+\.\w+): [^>]*>", r"\1", text)


def test_names_have_the_printed_arguments() -> None:
    for path, printed in SIGNATURES.items():
        function = found(path)
        assert callable(function), path
        assert plain(inspect.signature(function)) == printed, path


def test_names_are_listed_and_lazy() -> None:
    names = {path.partition(".")[0] for path in SIGNATURES}
    assert {*names, "parallel", "runtime"} <= set(dir(nnscaler))
    assert nnscaler.parallel.parallelize is nnscaler.parallelize
    assert nnscaler.runtime.f16_optimizer.MixedPrecisionAdam.__mro__[1:3] == (
        MixedPrecisionAdamW,
        AdamW_FP32OptimParams,
    )
    with pytest.raises(AttributeError, match="has no attribute 'parallelise'"):
        _ = nnscaler.parallelise  # type: ignore[attr-defined]  # mypy refuses it too


def named(name: str) -> bool:
    return f"`{name}`" in PAGE


def test_the_page_has_each_name() -> None:
    names = {path.rpartition(".")[2] for path in (*SIGNATURES, *ATTRIBUTES)} | (
        set(dir(nnscaler)) - {"parallel", "runtime"}
    )
    names |= {*inspect.signature(nnscaler.parallelize).parameters}
    names |= {field.name for field in dataclasses.fields(nnscaler.ComputeConfig)}
    names |= {member.name for kind in (nnscaler.ReuseType, nnscaler.BroadcastGenFilesStrategy) for member in kind}
    names |= {"1f1b", "1f1b_interleaved", "1f1b_plus", "gpipe", "chimera_direct", "infer_pipe"}
    assert not sorted(name for name in names if not named(name))


def test_the_page_has_each_policy_and_setting() -> None:
    assert not [name for name in POLICIES if f"| `{name}` |" not in PAGE]
    settings = {setting for _, known in POLICIES.values() for setting in known}
    assert not sorted(setting for setting in settings if f"`{setting}`" not in PAGE)
