"""Adapters of PEFT: names of their tensors, and PEFT's own files in the place of an earlier adapter.

::

    base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight        in the module
                     model.layers.0.self_attn.q_proj.weight                   in a file of the base model

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight    in the module
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight            in the adapter's file

    .unfinished/complete/       the new adapter, complete
    adapter_config.json         removed where the new one differs
    adapter_model.safetensors   replaced
    adapter_config.json         replaced last

Two files have no common rename, and PEFT has no field that names a file of weights. A save that is killed between them
leaves a directory that is no adapter for PEFT, never a mixture. ``load_pretrained`` then takes the new adapter, and the
next save puts it into its place. PEFT loads ``DIRECTORY/.unfinished/complete`` until the weights have moved.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nxdpp.checkpoint.huggingface.model_tensors import tensors_of, unwrapped_name
from nxdpp.checkpoint.huggingface.read_directory import ADAPTER_CONFIG, COMPLETE, UNFINISHED
from nxdpp.checkpoint.huggingface.replace_checkpoint import differs, put
from nxdpp.ground.torch_names import BUFFERS, MODULES, NON_PERSISTENT, PARAMETERS
from nxdpp.pipeline.local.elsewhere_tensors import on_meta
from nxdpp.pipeline.local.own_save import naming

_PROMPTS = "prompt_encoder."


def is_adapted(module: nn.Module) -> bool:
    """Return whether ``module`` is a ``PeftModel``. PEFT is not imported for that."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)


def adapter_names(module: Any, adapter: str) -> dict[str, str]:
    """Names of the tensors in the file of ``adapter``, with their names in ``module``; not for learned prompts.

    PEFT may ask the Hugging Face hub whether the vocabulary was extended. Raises ``NotImplementedError`` for an adapter
    whose file has tensors that are made from other tensors.
    """
    from peft import get_peft_model_state_dict

    state = {name: on_meta(tensor) for name, tensor in tensors_of(module).items()}
    names = {id(tensor): name for name, tensor in state.items()}
    with naming():
        selected = get_peft_model_state_dict(module, state_dict=state, adapter_name=adapter)
    made = [name for name, tensor in selected.items() if id(tensor) not in names]
    if made:
        kind = module.peft_config[adapter].peft_type
        raise NotImplementedError(
            f"PEFT makes {made[0]} of other tensors when it saves this adapter ({kind}), which is not implemented over "
            f"several stages: save local_state_dict() on each rank."
        )
    return {saved: names[id(tensor)] for saved, tensor in selected.items()}


def learns_prompts(module: Any, adapter: str) -> bool:
    """Return whether ``adapter`` is one of learned prompts, whose file has the output of an encoder."""
    return bool(module.peft_config[adapter].is_prompt_learning)


def base_names(module: Any) -> Iterator[tuple[str, str]]:
    """The name in the base model, and the name in ``module``, of each tensor of the base model.

    A module that is trained next to the adapter (``modules_to_save``) has the original and copies: the name in the base
    model comes once for each, the original first.
    """
    base = module.get_base_model()
    prefix = next(name for name, child in module.named_modules() if child is base)
    yield from _names(base, "", prefix)


def _names(module: nn.Module, name: str, full: str) -> Iterator[tuple[str, str]]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(module, BaseTunerLayer):
        yield from _names(module.get_submodule("base_layer"), name, f"{full}.base_layer")
        return
    if isinstance(module, AuxiliaryTrainingWrapper):
        yield from _names(module.original_module, name, f"{full}.original_module")
        for adapter, copy in dict(getattr(module, "modules_to_save", {}).items()).items():
            yield from _names(copy, name, f"{full}.modules_to_save.{adapter}")
        return
    buffers = [key for key in BUFFERS.of(module) if key not in NON_PERSISTENT.of(module)]
    for key in (*PARAMETERS.of(module), *buffers):
        if PARAMETERS.of(module).get(key, BUFFERS.of(module).get(key)) is not None:
            yield unwrapped_name(f"{name}.{key}" if name else key), unwrapped_name(f"{full}.{key}")
    for key, child in MODULES.of(module).items():
        if child is not None:
            yield from _names(child, f"{name}.{key}" if name else key, f"{full}.{key}")


def names_in_files(module: Any) -> list[str]:
    """Names in ``module`` of the tensors that the files of its adapters are made of."""
    names: dict[str, None] = {}
    for adapter in module.peft_config:
        if learns_prompts(module, adapter):
            names |= {name: None for name in tensors_of(module) if name.startswith(_PROMPTS)}
        else:
            names |= dict.fromkeys(adapter_names(module, adapter).values())
    return list(names)


def write_adapter(module: Any, tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write the files of the adapters of ``module``, with ``tensors`` by name, in the place of earlier ones.

    An adapter has a folder of its own unless its name is ``default``. ``start_save`` comes before.
    """
    made = directory / UNFINISHED / "adapter"
    try:
        made.mkdir()
        with _put(tensors, module), naming():
            type(module).save_pretrained(module, str(made))
    except BaseException:
        shutil.rmtree(directory / UNFINISHED, ignore_errors=True)
        raise
    _replace(made, directory)
    shutil.rmtree(directory / UNFINISHED, ignore_errors=True)


def _replace(made: Path, directory: Path) -> None:
    """Put the adapters in ``made``, complete in the unfinished folder, in the place of earlier ones."""
    for file in list(filter(Path.is_file, made.rglob("*"))):
        _usual_permissions(file)
        with file.open("rb") as written:
            os.fsync(written.fileno())
    complete = directory / UNFINISHED / COMPLETE
    shutil.rmtree(complete, ignore_errors=True)
    made.rename(complete)
    finish_adapter(directory)


def finish_adapter(directory: Path) -> None:
    """Move complete adapters from the unfinished folder of ``directory`` to their place; also after a kill."""
    complete = directory / UNFINISHED / COMPLETE
    for config in sorted(complete.rglob(ADAPTER_CONFIG)):
        target = directory / config.parent.relative_to(complete)
        target.mkdir(exist_ok=True)
        if differs(target / ADAPTER_CONFIG, config):
            # A mixture of two adapters must not look complete.
            (target / ADAPTER_CONFIG).unlink()
        files = filter(Path.is_file, config.parent.iterdir())
        for file in sorted(files, key=lambda file: file.name == ADAPTER_CONFIG):
            put(file, target / file.name)


def _usual_permissions(file: Path) -> None:
    # safetensors 0.8 lets only the owner read its files.
    probe = file.with_name(f"{file.name}.permissions")
    probe.touch()
    file.chmod(probe.stat().st_mode)
    os.unlink(probe)


@contextmanager
def _put(tensors: Mapping[str, torch.Tensor], module: nn.Module) -> Iterator[None]:
    """Put ``tensors`` into ``module`` by name; restore its own afterwards."""
    with ExitStack() as stack:
        modules = {unwrapped_name(name): child for name, child in module.named_modules(remove_duplicate=False)}
        for name, tensor in tensors.items():
            owner, _, key = name.rpartition(".")
            parent = modules[owner]
            registry: dict[str, Any] = PARAMETERS.of(parent) if key in PARAMETERS.of(parent) else BUFFERS.of(parent)
            stack.callback(registry.__setitem__, key, registry[key])
            is_parameter = registry is PARAMETERS.of(parent)
            registry[key] = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
        yield
