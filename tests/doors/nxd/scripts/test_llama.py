"""Calls of NxD 2.29's Llama scripts with their arguments: TP + PP + ZeRO-1, and TP + ZeRO-1 with a loop of its own.

The second runs over two replicas. Losses, norms and parameters equal a training in one process.
"""

import random
from argparse import Namespace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from transformers import get_linear_schedule_with_warmup, set_seed

import nxdpp as nxd
from nxdpp.optimizer import NeuronZero1Optimizer
from nxdpp.parallel_layers import mappings, parallel_state
from nxdpp.parallel_layers.random import model_parallel_xla_manual_seed
from nxdpp.parallel_layers.utils import requires_init_pg_override
from nxdpp.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams
from nxdpp.utils.batch_utils import get_batch_on_this_context_parallel_rank
from tests.doors.nxd.scripts.comparison import Run, compare, groups_of
from tests.doors.nxd.scripts.llama import (
    VOCABULARY,
    CoreAttention,
    Layer,
    LlamaForCausalLM,
    RMSNorm,
    Rotary,
    init_weights,
    llama_config,
)
from tests.support.run_ranks import run_ranks

STEPS, BATCH, LENGTH, SEED, RATE = 2, 8, 8, 1234, 1e-2


def dataset() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows]


def loader(size: int) -> DataLoader[Any]:
    """Of this rank's replica."""
    rows: Any = dataset()
    sampler: DistributedSampler[Any] = DistributedSampler(
        rows,
        num_replicas=parallel_state.get_data_parallel_size(),
        rank=parallel_state.get_data_parallel_rank(),
        shuffle=False,
        drop_last=True,
    )
    return DataLoader(rows, sampler=sampler, batch_size=size, num_workers=0, drop_last=True)


def set_random_seed(seed: int, tp: int, pp: int, ep: int) -> None:
    """As in ``training_utils`` of the scripts."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep
        )
    seed = seed + (100 * parallel_state.get_pipeline_model_parallel_rank())
    model_parallel_xla_manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def precision() -> dict[str, bool]:
    return {"use_master_weights": True, "use_fp32_grad_acc": True, "use_master_weights_in_ckpt": False}


def one_process(flags: Namespace) -> Run:
    """Losses, norms and parameters of a plain loop over the same model in this process."""
    parallel_state.initialize_model_parallel()
    try:
        torch.manual_seed(SEED)
        options = vars(flags.model) | {"return_dict": True}
        if flags.use_meta_device_init:
            # The same initial values as any layout has.
            config = nxd.neuronx_distributed_config(
                model_init_config={"meta_device_init": True, "param_init_fn": init_weights}
            )
            model: nn.Module = nxd.initialize_parallel_model(config, LlamaForCausalLM, True, llama_config(**options))
        else:
            model = LlamaForCausalLM(llama_config(**options))
        optimizer = torch.optim.AdamW(groups_of(list(model.named_parameters())), lr=RATE, betas=(0.9, 0.95))
        schedule = get_linear_schedule_with_warmup(optimizer, 1, 10)
        losses, norms = [], []
        for start in range(0, STEPS * BATCH, BATCH):
            parts = torch.stack([row["input_ids"] for row in dataset()[start : start + BATCH]]).chunk(4)
            each = []
            for part in parts:
                with torch.autocast(torch.empty(0).device.type, enabled=flags.use_amp > 0, dtype=torch.bfloat16):
                    each.append(model(input_ids=part, labels=part).loss)
                (each[-1] / len(parts)).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(torch.stack(each).mean().item())
        return losses, norms, {name: value.detach().clone() for name, value in model.named_parameters()}
    finally:
        parallel_state.destroy_model_parallel()


def pipelined(args: Namespace, expected: Run, folder: Path) -> None:
    """The calls of ``run_llama_nxd.py``."""
    set_random_seed(args.seed, args.tensor_parallel_size, args.pipeline_parallel_size, 1)
    config = llama_config(**vars(args.model))
    model_init_config = {"meta_device_init": True, "param_init_fn": init_weights} if args.use_meta_device_init else None
    nxd_config = nxd.neuronx_distributed_config(
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        context_parallel_size=args.context_parallel_size,
        pipeline_config={
            "transformer_layer_cls": Layer,
            "num_microbatches": args.num_microbatches,
            "output_loss_value_spec": (True, False),
            "input_names": ["input_ids", "attention_mask", "labels"],
            "virtual_pipeline_size": args.virtual_pipeline_size,
            "auto_partition": True,
            "trace_file_path": args.trace_file_path,
            "param_init_fn": None,
            "leaf_module_cls": [RMSNorm.__name__, Rotary.__name__],
            "autowrap_modules": [mappings],
            "use_zero1_optimizer": args.use_zero1_optimizer > 0,
            "use_optimizer_wrapper": True,
            "deallocate_pipeline_outputs": args.deallocate_pipeline_outputs > 0,
            "fuse_microbatches": args.fuse_microbatches > 0,
        },
        optimizer_config={
            "zero_one_enabled": args.use_zero1_optimizer > 0,
            "grad_clipping": True,
            "max_grad_norm": 1.0,
        },
        sequence_parallel=args.use_sequence_parallel,
        activation_checkpoint_config=CoreAttention if args.use_selective_checkpoint > 0 else "full",
        model_init_config=model_init_config,
        mixed_precision_config=precision() | {"use_master_weights_in_ckpt": True} if args.use_zero1_optimizer else None,
    )
    assert nxd_config["lnc_size"] == 1

    def get_model(config: Any) -> nn.Module:
        model = LlamaForCausalLM(config)
        assert sum(np.prod(p.size()) for p in model.parameters()) > 0
        return model

    include_buffers = True
    model = nxd.initialize_parallel_model(nxd_config, get_model, include_buffers, config)
    assert hasattr(model, "local_named_parameters")
    assert model.partitioned
    optimizer = nxd.initialize_parallel_optimizer(
        nxd_config,
        AdamW_FP32OptimParams if args.use_fp32_optimizer > 0 else torch.optim.AdamW,
        groups_of(list(model.local_named_parameters())),
        lr=RATE,
        betas=(0.9, 0.95),
        weight_decay=0.01,
    )
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 1, 10)
    assert nxd.has_checkpoint(folder) is False
    # A save before the first step shows whether its arguments hold.
    state = {"path": folder, "tag": "step_0", "model": model, "optimizer": optimizer, "scheduler": lr_scheduler}
    with pytest.raises(ValueError, match="num_kept_ckpts=0 must be a whole number of at least 1"):
        nxd.save_checkpoint(**state, num_kept_ckpts=0)
    assert nxd.has_checkpoint(folder) is False
    nxd.save_checkpoint(**state, num_kept_ckpts=args.num_kept_checkpoint)
    initial = {name: value.detach().clone() for name, value in model.local_named_parameters()}
    is_last = parallel_state.get_pipeline_model_parallel_rank() == args.pipeline_parallel_size - 1
    for batch_idx, batch in enumerate(loader(BATCH)):
        if parallel_state.get_context_model_parallel_size() > 1:
            batch = get_batch_on_this_context_parallel_rank(batch)
        device_type = parallel_state.local_device().type
        with torch.autocast(enabled=args.use_amp > 0, dtype=torch.bfloat16, device_type=device_type):
            loss = model.run_train(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]
            )
        optimizer.step()
        global_norm = optimizer.grad_norm
        optimizer.zero_grad()
        if is_last:
            torch.testing.assert_close(loss.detach(), torch.tensor(expected[0][batch_idx]), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(global_norm, torch.tensor(expected[1][batch_idx]), rtol=1e-4, atol=0)
        total_steps = batch_idx + 1
        lr_scheduler.step()
        nxd.save_checkpoint(
            folder,
            tag=f"step_{total_steps}",
            model=model,
            optimizer=optimizer,
            scheduler=lr_scheduler,
            user_content={
                "total_steps": total_steps,
                "batch_idx": batch_idx,
                "epoch": 0,
                "cli_args": {name: value for name, value in args.__dict__.items() if name != "model"},
            },
            use_xser=args.save_load_xser,
            num_kept_ckpts=args.num_kept_checkpoint,
            async_save=args.async_checkpoint_saving,
            avoid_saving_lower_precision_weights=args.avoid_saving_lower_precision_weights,
        )
    if args.async_checkpoint_saving:
        nxd.finalize_checkpoint()
    compare(model.local_named_parameters(), expected[2])
    kept = {name: value.detach().clone() for name, value in model.local_named_parameters()}
    with torch.no_grad():
        for parameter in model.local_parameters():
            parameter.zero_()
    assert nxd.has_checkpoint(folder)
    content = nxd.load_checkpoint(folder, tag=None, model=model, optimizer=optimizer, scheduler=lr_scheduler)
    assert (content["total_steps"], content["batch_idx"], content["cli_args"]["seed"]) == (STEPS, STEPS - 1, SEED)
    for name, parameter in model.local_named_parameters():
        assert torch.equal(parameter, kept[name]), name
    # -1 keeps all.
    nxd.load_checkpoint(**state)
    for name, parameter in model.local_named_parameters():
        assert torch.equal(parameter, initial[name]), name
    if args.use_zero1_optimizer > 0:
        cast(NeuronZero1Optimizer, optimizer.optimizer).init_zero()
    assert len(optimizer.params) == len(list(model.local_parameters()))
    parallel_state.destroy_model_parallel()


def own_loop(flags: Namespace, expected: Run, folder: Path) -> None:
    """The calls of ``tp_zero1_llama_hf_pretrain.py``."""
    assert not requires_init_pg_override()
    set_seed(flags.seed)
    nxd_config = nxd.neuronx_distributed_config(
        tensor_parallel_size=flags.tensor_parallel_size,
        context_parallel_size=flags.context_parallel_size,
        optimizer_config={"zero_one_enabled": flags.use_zero_1, "grad_clipping": True, "max_grad_norm": 1.0},
        sequence_parallel=flags.sequence_parallel_enabled,
        activation_checkpoint_config=CoreAttention if flags.selective_checkpoint_enabled else "full",
        model_init_config=None,
        mixed_precision_config=precision(),
    )

    def get_model(flags: Namespace) -> nn.Module:
        return LlamaForCausalLM(llama_config(**vars(flags.model), return_dict=True))

    model = nxd.initialize_parallel_model(nxd_config, get_model, True, flags)
    device = parallel_state.local_device()
    running_loss = torch.zeros(1, dtype=torch.double).to(device)
    optimizer = nxd.initialize_parallel_optimizer(
        nxd_config,
        AdamW_FP32OptimParams,
        groups_of(list(model.named_parameters())),
        lr=RATE,
        betas=(0.9, 0.95),
        weight_decay=0.01,
    )
    optimizer.zero_grad()
    assert str(optimizer)
    assert model.config.model_type == "llama"
    assert str(model.dtype) == "torch.float32"
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=10, last_epoch=-1)
    replicas = parallel_state.get_data_parallel_size()
    steps = 0
    for number, data in enumerate(loader(BATCH // replicas // flags.grad_accum_usteps), 1):
        outputs = model(input_ids=data["input_ids"], attention_mask=data["attention_mask"], labels=data["labels"])
        loss = outputs.loss / flags.grad_accum_usteps
        loss.backward()
        running_loss += loss.detach()
        if number % flags.grad_accum_usteps:
            continue
        running_loss_div = running_loss / replicas
        dist.all_reduce(running_loss_div, group=parallel_state.get_data_parallel_group())
        running_loss.zero_()
        optimizer.step()
        torch.testing.assert_close(running_loss_div.item(), expected[0][steps], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(optimizer.grad_norm, torch.tensor(expected[1][steps]), rtol=1e-4, atol=0)
        optimizer.zero_grad()
        scheduler.step()
        steps += 1
        nxd.save_checkpoint(
            folder, f"step_{steps}", model, optimizer, scheduler, {"epoch": 0, "global_step": steps}, 8, True, -1
        )
    assert steps == STEPS
    compare(model.named_parameters(), expected[2])
    content = nxd.load_checkpoint(folder, tag="step_1", model=model, optimizer=optimizer, scheduler=scheduler)
    assert content == {"epoch": 0, "global_step": 1}
    parallel_state.destroy_model_parallel()


DEFAULTS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "context_parallel_size": 1,
    "virtual_pipeline_size": 1,
    "num_microbatches": 4,
    "trace_file_path": None,
    "use_zero1_optimizer": 1,
    "use_sequence_parallel": 1,
    "use_meta_device_init": 0,
    "use_fp32_optimizer": 0,
    "use_selective_checkpoint": 0,
    "deallocate_pipeline_outputs": 1,
    "fuse_microbatches": 0,
    "use_amp": 0,
    "seed": SEED,
    "save_load_xser": 1,
    "num_kept_checkpoint": -1,
    "async_checkpoint_saving": 0,
    "avoid_saving_lower_precision_weights": 0,
}
PIPELINED = [
    Namespace(**DEFAULTS, model=Namespace(sequence_parallel_enabled=True)),
    Namespace(
        **DEFAULTS
        | {
            "virtual_pipeline_size": 2,
            "use_zero1_optimizer": 0,
            "use_sequence_parallel": 0,
            "use_meta_device_init": 1,
            "use_fp32_optimizer": 1,
            "use_selective_checkpoint": 1,
            "async_checkpoint_saving": 1,
            "avoid_saving_lower_precision_weights": 1,
        },
        model=Namespace(
            use_flash_attention=True, selective_checkpoint_enabled=True, num_key_value_heads=2, qkv_linear=True
        ),
    ),
]
OWN_LOOP = Namespace(
    tensor_parallel_size=2,
    context_parallel_size=1,
    use_zero_1=True,
    use_meta_device_init=0,
    use_amp=0,
    sequence_parallel_enabled=True,
    selective_checkpoint_enabled=False,
    grad_accum_usteps=2,
    seed=SEED,
    model=Namespace(sequence_parallel_enabled=True, use_flash_attention=True),
)


def scripts(rank: int, runs: list[Run], folder: Path) -> None:
    # Scripts ask for their rank first.
    dist.init_process_group()
    assert dist.get_rank() == rank
    own_loop(OWN_LOOP, runs[-1], folder / "own")
    dist.destroy_process_group()
    for number, (args, run) in enumerate(zip(PIPELINED, runs, strict=False)):
        pipelined(args, run, folder / str(number))


def test_llama_scripts_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    run_ranks(4, scripts, [one_process(args) for args in (*PIPELINED, OWN_LOOP)], tmp_path)
