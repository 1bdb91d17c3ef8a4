"""Sharded replicas train as whole ones; what a step gathers, and replicas in different calls."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

import nxdpp
from nxdpp import NxDPPModel, parallel_state
from nxdpp.gradients.shards.unit import ShardedUnit
from tests.support.adapted_models import adapted
from tests.support.models import VOCABULARY, llama
from tests.support.run_ranks import run_ranks
from tests.support.whole_numbers import distance, state_of

MICROBATCHES = 4
STEPS = 2
EQUAL = 1e-12
# Under autocast a difference of rounding in float32 may be one of bfloat16 after a step.
ROUNDING = {"float32": 1e-5, "autocast": 1e-2, "scaler": 1e-2}

Case = dict[str, Any]

FAMILIES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb1p", "zb-v", "dualpipe-v", "v-half")
TWO_STAGES_A_RANK = ("interleaved", "looped-bfs")
PIPELINE: dict[str, int] = {"pipeline_model_parallel_size": 2}
TENSOR: dict[str, int] = {"tensor_model_parallel_size": 2}
HYBRID: dict[str, int] = {"data_parallel_shard_size": 2}
EXTRAS = (
    "plain",
    "lora",
    "frozen layers",
    "checkpoint",
    "tokens",
    "no_sync",
    "accumulated",
    "autocast",
    "scaler",
    "clipped",
    "deferred",
    "compiled",
    "float32",
)


def case_of(extra: str, schedule: str | None = None, resharding: bool | None = None, tied: bool = False) -> Case:
    return {"schedule": schedule, "resharding": resharding, "tied": tied, "extra": extra}


def drawn(count: int, seed: int, families: tuple[str | None, ...], extras: tuple[str, ...]) -> list[Case]:
    """Return ``count`` drawn cases."""
    draw = random.Random(seed)
    return [
        {
            "schedule": draw.choice(families),
            "resharding": draw.choice((None, True)),
            "tied": draw.random() < 0.4,
            "extra": draw.choice(extras),
        }
        for _ in range(count)
    ]


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Tokens of this replica, (8, 6); other replicas have other ones, and other numbers of labels."""
    replica = parallel_state.get_data_parallel_rank()
    ids = torch.randint(0, VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(100 * replica + step))
    labels = ids.clone()
    labels[:3, : 2 + replica] = -100
    if step >= 40 and replica == 0:
        labels[2:4] = -100
    return {"input_ids": ids, "labels": labels}


def wrapped(case: Case, shards: bool) -> tuple[Any, Any]:
    """The model of ``case``, with its scaler."""
    extra, schedule = case["extra"], case["schedule"]
    is_wide = extra not in ROUNDING
    # A layer for each stage; two on each stage where gathers of layers are counted.
    layers = 4 if extra == "plain" or schedule not in (None, "1f1b") else 2
    torch.manual_seed(0)

    def build() -> Any:
        built = llama(layers, tie_word_embeddings=case["tied"])
        return built.double() if is_wide else built

    bare: Any = nxdpp.deferred_init(build) if extra == "deferred" else build()
    if extra == "experts":
        bare = adapted("lora of experts").double()
        # Grouped products are of no float64.
        bare.get_base_model().set_experts_implementation("eager")
    if extra == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        bare = get_peft_model(bare, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    if parallel_state.get_tensor_model_parallel_size() > 1:
        bare = nxdpp.tensor_parallelize(bare, sequence_parallel="sequence" in extra)
    scaler = nxdpp.GradScaler(init_scale=8.0) if extra == "scaler" else None
    given: dict[str, Any] = {} if scaler is None else {"grad_scaler": scaler}
    if extra in ("tokens", "no labels"):
        given["loss_normalization"] = "tokens"
    if schedule is not None and parallel_state.get_pipeline_model_parallel_size() > 1:
        given["schedule"] = schedule
        given["virtual_pipeline_size"] = 2 if schedule in TWO_STAGES_A_RANK else 1
    model = NxDPPModel(bare, num_microbatches=MICROBATCHES, broadcast_and_average_loss=True, **given)
    if not shards:
        model.move_model_to_device()
    if extra == "checkpoint":
        nxdpp.apply_checkpoint(model)
    if extra == "compiled":
        nxdpp.apply_compile(model, backend="aot_eager")
    if shards:
        nxdpp.fully_shard(model, reshard_after_forward=case["resharding"])
    if extra == "frozen layers":
        for name, parameter in model.local_named_parameters():
            parameter.requires_grad_("mlp" not in name and "layers.1." not in name)
    return model, scaler


def trained(case: Case, shards: bool) -> dict[str, torch.Tensor]:
    """Losses, norms, the last gradients and the parameters of a training, each whole."""
    model, scaler = wrapped(case, shards)
    extra = case["extra"]
    own = [parameter for parameter in model.local_parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=1e-3, eps=1e-6)
    dtype = {"autocast": torch.bfloat16, "scaler": torch.float16}.get(extra)
    numbers: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        if extra == "accumulated" or "no_sync" in extra:
            with model.no_sync() if extra != "accumulated" else nullcontext():
                model.run_train(**batch_of(30 + step))
                # Bad numbers are left out.
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                numbers[f"first loss {step}"] = model.run_train(**batch_of(10 + step))
        with nullcontext() if dtype is None else torch.autocast(torch.empty(0).device.type, dtype):
            numbers[f"loss {step}"] = model.run_train(**batch_of(step + 40 * (extra == "no labels")))
        if scaler is not None:
            scaler.unscale_(optimizer)
        if extra in ("clipped", "scaler"):
            numbers[f"norm {step}"] = model.clip_grad_norm_(0.5)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    numbers["evaluation"] = model.run_eval(**batch_of(20))
    return numbers | state_of(model)


def train_cases(rank: int, runs: list[tuple[dict[str, int], list[Case]]]) -> list[tuple[Case, float, str]]:
    """Train each case of each layout whole and sharded; the groups are made anew for each layout."""
    found = []
    for layout, cases in runs:
        parallel_state.initialize_model_parallel(**layout, hang_timeout=60)  # type: ignore[arg-type]
        for case in cases:
            theirs = trained(case, shards=False)
            found.append((layout | case, *distance(trained(case, shards=True), theirs, 1e-3)))
        parallel_state.destroy_model_parallel()
    return found


def check(results: list[list[tuple[Case, float, str]]]) -> None:
    for rank in results:
        for case, found, name in rank:
            bound = ROUNDING.get(case["extra"], EQUAL)
            assert found <= bound, f"{case}: {name} by {found}"


def test_layouts_train_as_whole_replicas() -> None:
    """Each axis and each extra once, over the fewest ranks that have it."""
    check(run_ranks(2, train_cases, [({}, [case_of("scaler"), case_of("compiled", None, True), case_of("experts")])]))
    of_four = [
        (
            PIPELINE,
            [
                case_of("tokens", "zb-v", True),
                case_of("no_sync", "interleaved", tied=True),
                case_of("no labels", "1f1b", True, tied=True),
            ],
        ),
        (TENSOR, [case_of("sequence", None, True)]),
        (HYBRID, [case_of("clipped", tied=True)]),
    ]
    check(run_ranks(4, train_cases, of_four))


def test_three_dimensions_train_as_whole_replicas() -> None:
    check(run_ranks(8, train_cases, [(PIPELINE | TENSOR, [case_of("clipped", "1f1b", tied=True)])]))


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(4))
def test_drawn_layouts_train_as_whole_replicas(seed: int) -> None:
    others = tuple(extra for extra in EXTRAS if extra not in ("lora", "deferred"))
    runs = [
        (PIPELINE, drawn(10, seed, FAMILIES, EXTRAS)),
        (TENSOR, drawn(4, seed + 10, (None,), (*others, "sequence"))),
        (HYBRID, drawn(4, seed + 20, (None,), EXTRAS)),
    ]
    check(run_ranks(4, train_cases, runs))


COUNTED = (case_of("plain", "1f1b"), case_of("plain", "interleaved", tied=True), case_of("plain", "1f1b", True))


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the bytes that this rank gives to gathers, and to reductions, of parameters."""
    counts = {"gathered": 0, "reduced": 0}
    kinds: tuple[tuple[Any, str], ...] = ((DefaultAllGather, "gathered"), (DefaultReduceScatter, "reduced"))
    with pytest.MonkeyPatch.context() as patch:
        for kind, name in kinds:
            patch.setattr(kind, "__call__", partial(_counted, counts, name, partial(kind.__call__, kind())))
        yield counts


def _counted(counts: dict[str, int], name: str, call: Callable[..., Any], **named: Any) -> Any:
    counts[name] += named["input_tensor"].nbytes
    return call(**named)


def count(rank: int) -> dict[str, Any]:
    """Bytes of a step, as multiples of this rank's rows, and how many layers are whole at a time and after it."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, hang_timeout=60)
    found: dict[str, Any] = {}
    for case in COUNTED:
        form = f"{case['schedule']}, {case['resharding']}"
        model, _ = wrapped(case, shards=True)
        model.run_train(**batch_of(0))
        units: list[ShardedUnit] = model.part.shards.units
        most = 0

        def watch(*_: Any, units: list[ShardedUnit] = units) -> None:
            nonlocal most
            layers = [unit for unit in units if unit.name.startswith("model.layers.")]
            most = max(most, sum(map(has_memory, layers)))

        for name, module in model.local_named_modules():
            if name.endswith("mlp"):
                module.register_forward_hook(watch)
        with counted() as counts:
            model.run_train(**batch_of(1))
        layers, rest = (
            sum(rows_bytes(unit) for unit in units if unit.name.startswith("model.layers.") == is_layer)
            for is_layer in (True, False)
        )
        found[form] = {
            **counts,
            "layers": layers,
            "rest": rest,
            "whole": sum(each._orig_size.numel() * 8 for unit in units for each in unit._group.fsdp_params),
            "whole at a time": most,
            "whole after": sum(map(has_memory, units)),
        }
        model.run_eval(**batch_of(2))
        found[form]["whole after"] += sum(map(has_memory, units))
    return found


def rows_bytes(unit: ShardedUnit) -> int:
    """Bytes of this rank's rows, padded to those of the first rank."""
    return sum(each._sharded_param_data.nbytes for each in unit._group.fsdp_params)


def has_memory(unit: ShardedUnit) -> bool:
    """Return whether the whole parameters of ``unit`` are in memory."""
    return any(each._unsharded_param.untyped_storage().size() for each in unit._group.fsdp_params)


def test_a_step_gathers_and_reduces_each_byte_as_often_as_it_must() -> None:
    for rank in run_ranks(4, count):
        once, twice, each = rank["1f1b, None"], rank["interleaved, None"], rank["1f1b, True"]
        for found in (once, twice):
            rows = found["layers"] + found["rest"]
            assert found["gathered"] == rows
            assert found["reduced"] == 2 * rows
            assert found["whole"] <= 2 * rows <= 1.1 * found["whole"]
        rows = each["layers"] + each["rest"]
        # A layer for the forward and for the backward of each microbatch.
        assert each["gathered"] == 2 * MICROBATCHES * rows
        assert each["reduced"] == MICROBATCHES * 2 * rows
        assert once["whole after"] == twice["whole after"] == each["whole after"] == 0
        assert once["whole at a time"] == twice["whole at a time"] == 2
        assert each["whole at a time"] == 1


def differ(rank: int) -> None:
    """Begin different calls on the two replicas."""
    parallel_state.initialize_model_parallel(hang_timeout=60)
    model, _ = wrapped(case_of("plain"), shards=True)
    for _ in range(2):
        model.run_train(**batch_of(0))
    (model.run_train if rank == 0 else model.run_eval)(**batch_of(0))


def test_replicas_in_different_steps_name_both() -> None:
    words = r"in run_train step 3 \(gather of parameters for a training step\), and .* in run_eval step 1 \(gather"
    with pytest.raises(AssertionError, match=words):
        run_ranks(2, differ)
