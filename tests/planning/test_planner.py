"""``nxdpp.plan`` from Python, and ``NxDPPModel.from_plan``."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import nxdpp
from nxdpp import NxDPPModel, parallel_state
from nxdpp.planning.layout import Layout
from nxdpp.planning.plan import Plan

LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
CPU: dict[str, Any] = {"device_memory": "1GB", "device": "cpu"}
STATES = {"states": torch.zeros(3, 16)}
HALF = {"states": torch.zeros(3, 16, dtype=torch.bfloat16)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + torch.tanh(self.linear(states))


class Stack(nn.Module):
    """Any model: it is traced quicker than one of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            states = layer(states)
        return states.square().mean()


def test_a_model_of_no_library_is_planned_from_a_batch() -> None:
    model = Stack()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    plan = nxdpp.plan(model, devices=2, global_batch=8, inputs={"states": torch.zeros(3, 16)}, **CPU)

    assert plan.model == "Stack"
    assert plan.layout.tensor == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not parallel_state.model_parallel_is_initialized()
    with pytest.raises(ValueError, match="the inputs of Stack are unknown: give inputs="):
        nxdpp.plan(model, devices=2, global_batch=8, **CPU)


def _plan(**options: Any) -> Plan:
    """A plan of ``Stack`` for two devices."""
    given = {"devices": 2, "global_batch": 4, **CPU, **options}
    return nxdpp.plan(Stack(), inputs=HALF if given.get("dtype") == "bfloat16" else STATES, **given)


def test_half_parameters_have_float32_state_in_all_layouts() -> None:
    found = _plan(dtype="bfloat16", best=12)
    assert all(each.layout.zero for each in found.best)
    assert 1 in {each.layout.data for each in found.best}
    assert (found.optimizer_dtype, found.has_masters) == ("float32", True)
    # Two moments and a copy, of 4 bytes a parameter in the place of 2.
    whole, half = (_plan(dtype="bfloat16", layouts=[Layout(pipeline=2, zero=zero)]) for zero in (1, 0))
    assert whole.first.memory[0].optimizer == 3 * half.first.memory[0].optimizer
    assert (half.optimizer_dtype, half.has_masters) == ("bfloat16", False)
    without = _plan(dtype="bfloat16", fixed={"zero": 0}, best=1)
    assert {each.layout.zero for each in without.best} == {0}
    with pytest.raises(ValueError, match="float32 in layouts with zero=1 or more, and bfloat16 in the others"):
        _plan(dtype="bfloat16", layouts=[Layout(data=2), Layout(data=2, zero=1)])


@pytest.mark.parametrize(
    ("layout", "dtype", "gradients", "lines"),
    [
        (
            Layout(data=2, zero=2, checkpoint=True),
            "bfloat16",
            None,
            [
                "apply_checkpoint(model)",
                "fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))",
            ],
        ),
        (
            Layout(data=2, zero=3),
            "bfloat16",
            "float32",
            [
                "fully_shard(model, reshard_after_forward=True, mp_policy=MixedPrecisionPolicy("
                "param_dtype=torch.bfloat16, reduce_dtype=torch.float32))"
            ],
        ),
    ],
)
def test_shards_are_the_float32_copies(layout: Layout, dtype: str, gradients: str | None, lines: list[str]) -> None:
    """AdamW steps shards in float32, which are gathered in the dtype of a step."""
    plan = _plan(layouts=[layout], dtype=dtype, gradient_dtype=gradients)

    script = plan.script()
    start, end = "\n".join([*lines, "model.move_model_to_device()"]), "optimizer = torch.optim.AdamW("
    assert start in script
    assert script.index(start) < script.index(end)
    assert "use_zero1_optimizer" not in script
    assert (plan.parameter_dtype, plan.optimizer_dtype) == ("float32", "float32")
    assert plan == Plan.from_json(plan.to_json())
    (memory,) = plan.first.memory
    assert memory.weights + memory.optimizer == 12 * plan.parameters / 2


def test_xla_devices_have_no_shards() -> None:
    assert {each.layout.zero for each in _plan(device="tpu-v5p").best} <= {0, 1}
    with pytest.raises(ValueError, match="fully_shard is not for XLA devices: give zero=0 or 1, not 3"):
        _plan(device="tpu-v5p", layouts=[Layout(data=2, zero=3)])


def test_gradients_of_half_parameters_accumulate_in_float32() -> None:
    half, whole = (
        _plan(dtype="bfloat16", layouts=[Layout(data=2, zero=1)], gradient_dtype=gradients)
        for gradients in (None, "float32")
    )
    assert whole.first.memory[0].gradients == 2 * half.first.memory[0].gradients
    # Gradients are reduced in 4 bytes a parameter, and parameters gathered in 2.
    assert whole.first.most_sent.data == 1.5 * half.first.most_sent.data
    assert "accumulated_dtype=torch.float32, lr" in whole.script()
    assert (half.gradient_dtype, whole.gradient_dtype) == (None, "float32")
    assert _plan(gradient_dtype="float32", layouts=[Layout(data=2)]).gradient_dtype is None
    with pytest.raises(ValueError, match=r"AdamW steps parameters in bfloat16 .* zero=0, or give zero=1"):
        _plan(dtype="bfloat16", gradient_dtype="float32", fixed={"zero": 0})


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024)) for _ in range(2)])

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            states = layer(states)
        return states.square().mean()


def test_autocast_computes_in_half_and_keeps_float32_parameters() -> None:
    with torch.device("meta"):
        wide = Wide()

    def plan(rows: int, device: str = "h100", autocast: str | None = "bfloat16") -> Plan:
        states = {"states": torch.zeros(1, rows, 1024, device="meta")}
        job: dict[str, Any] = {"devices": 1, "global_batch": 2, "device_memory": "9GB", "layouts": [Layout()]}
        given: dict[str, Any] = {"inputs": states, "transformer_layer_cls": nn.Sequential, **job}
        return nxdpp.plan(wide, device=device, autocast=autocast, **given)

    mixed, whole = plan(2), plan(2, autocast=None)

    assert (mixed.dtype, mixed.autocast, mixed.optimizer_dtype) == ("float32", "bfloat16", "float32")
    (of_mixed,), (of_whole,) = mixed.first.memory, whole.first.memory
    assert of_mixed.weights == of_whole.weights
    assert of_mixed.optimizer == of_whole.optimizer
    # Of two rows: the converted weights, the gradient of one layer, and a float32 copy of it.
    layer = 1024 * 1024
    assert of_mixed.activations == pytest.approx(2 * 2 * layer + 2 * layer + 4 * layer, rel=0.02)
    assert of_whole.activations == pytest.approx(4 * layer, rel=0.02)
    # A data sheet has 14.8 times the FLOPs in half. Other operations move as many bytes, or wait.
    fast, slow = (plan(8192, autocast=autocast).first.times[0].compute for autocast in ("bfloat16", None))
    assert 2 < slow / fast < 14
    assert mixed.note == ""
    # CUDA computes layer norms in float32, and keeps their inputs in it.
    on_cuda, on_cpu = (plan(8192, device).first.memory[0].activations for device in ("h100", "cpu"))
    assert on_cuda > 1.1 * on_cpu


def test_a_data_sheet_replaces_a_named_device() -> None:
    def plan(**options: Any) -> Plan:
        job: dict[str, Any] = {"device_memory": "1GB", "inputs": STATES, "layouts": [Layout()]}
        return nxdpp.plan(Stack(), devices=1, global_batch=2, **job, **options)

    def seconds(**options: Any) -> float:
        return plan(**options).first.step_seconds

    assert seconds(peak="67TFLOP/s", bandwidth="3.35TB/s") == pytest.approx(seconds(device="h100"))
    assert seconds(peak="6.7MFLOP/s") > 2 * seconds()
    assert seconds(bandwidth="3.35MB/s") > 2 * seconds()
    assert plan(peak="1TFLOP/s").note == "h100 with peak 1TFLOP/s, as given."
    notes = {"mi300x": "", "tpu-v5p": "memory of an XLA device is counted as a CPU's, without"}
    for device, note in notes.items():
        found = plan(device=device)
        assert found.first.step_seconds > 0
        assert found.note.startswith(note)
        assert bool(found.note) == bool(note)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"device": "tpu"}, "there is no device 'tpu'. Choose one of a100, h100, h200, b200, mi300x, tpu-v5p, cpu"),
        ({"costs": "profiled"}, "must be 'counted' or 'measured', which takes the place of 'profiled'"),
        ({"autocast": "float16"}, "plan with autocast='bfloat16', which takes the same time"),
        ({"autocast": "bfloat16", "dtype": "bfloat16"}, "plans are of float32 parameters under autocast"),
        ({"layouts": [Layout(pipeline=2, zero=3)]}, "ZeRO-3 shares parameters among replicas, and there is one"),
        ({"seq_length": 16, "inputs": {"input_ids": torch.zeros(1, 4)}}, "seq_length and inputs exclude each other"),
        ({"seq_length": 64}, "a sequence length of 64 is more than max_position_embeddings=32"),
    ],
)
def test_arguments_that_are_not_understood(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        nxdpp.plan(LLAMA, **{"devices": 2, "global_batch": 4, **CPU, **arguments})


def test_a_configuration_gives_the_dtype_of_its_constructor() -> None:
    """Also where it names another one: ``from_plan`` takes the model that ``LlamaForCausalLM(config)`` makes."""
    config = LlamaConfig.from_dict(LLAMA.to_dict() | {"dtype": "bfloat16"})

    def plan(**options: Any) -> Plan:
        return nxdpp.plan(config, devices=1, global_batch=2, layouts=[Layout()], **CPU, **options)

    plan().check_model(LlamaForCausalLM(config))
    plan(dtype="bfloat16").check_model(nn.Module.to(LlamaForCausalLM(config), torch.bfloat16))
    assert config.dtype == torch.bfloat16


def test_a_half_model_is_given_in_float32_where_replicas_share_its_parameters() -> None:
    model = Stack().bfloat16()
    job: dict[str, Any] = {"devices": 2, "global_batch": 2, "fixed": {"data": 2, "zero": 3}, "best": 1}
    plan = nxdpp.plan(model, inputs=HALF, **job, **CPU)

    with pytest.raises(ValueError, match=r"in bfloat16: give it in float32 \(\.float\(\)\): its shards are float32"):
        plan.check_model(model)
    plan.check_model(model.float())


@pytest.fixture(scope="module")
def plan() -> Plan:
    layout = Layout(tensor=2, pipeline=2, data=2, zero=1, sequence=True, checkpoint=True)
    return nxdpp.plan(LLAMA, devices=8, global_batch=8, seq_length=32, layouts=[layout], **CPU)


def test_a_model_is_wrapped_for_a_plan(plan: Plan) -> None:
    parallel_state.initialize_debug(pipeline_model_parallel_size=2, tensor_model_parallel_size=2, data_parallel_size=2)
    try:
        model = NxDPPModel.from_plan(LlamaForCausalLM(LLAMA), plan, return_mb_loss=True)
    finally:
        parallel_state.destroy_model_parallel()

    assert model.num_microbatches == plan.first.microbatches
    assert model.pipeline_cuts == plan.first.cuts
    assert model.virtual_pipeline_size == plan.layout.chunks
    assert model.use_zero1_optimizer
    assert model.return_mb_loss
    weight = dict(model.local_named_parameters())["model.layers.0.self_attn.q_proj.weight"]
    assert weight.shape == (16, 32)
    assert "sequence_parallel=True" in plan.script()
    assert "apply_checkpoint(model)" in plan.script()


def test_a_job_of_other_sizes_is_refused(plan: Plan) -> None:
    parallel_state.initialize_debug(pipeline_model_parallel_size=2)
    module = LlamaForCausalLM(LLAMA)
    try:
        with pytest.raises(ValueError, match=r"the plan is for .*'tensor': 2.* and the job has .*'tensor': 1"):
            NxDPPModel.from_plan(module, plan)
        for name in ("num_microbatches", "schedule", "virtual_pipeline_size", "partition", "use_zero1_optimizer"):
            with pytest.raises(ValueError, match=f"the plan chooses {name}: leave it out"):
                NxDPPModel.from_plan(module, plan, **{name: 4})
        with pytest.raises(ValueError, match="is for a LlamaForCausalLM in float32, and the model is a LlamaModel in"):
            NxDPPModel.from_plan(module.model, plan)
        with pytest.raises(ValueError, match=r"in float32, and the model is a LlamaForCausalLM in bfloat16: .* dtype="):
            NxDPPModel.from_plan(LlamaForCausalLM(LLAMA).bfloat16(), plan)
    finally:
        parallel_state.destroy_model_parallel()
    assert module.model.layers[0].self_attn.q_proj.weight.shape == (32, 32)


@pytest.mark.filterwarnings("ignore:.*this plan was not compared")
def test_a_plan_knows_the_tensor_plan_and_the_layers(plan: Plan) -> None:
    tensor_plan = {"layers.*.linear": "colwise_gather_output"}
    found = nxdpp.plan(
        Stack(),
        devices=2,
        global_batch=2,
        inputs={"states": torch.zeros(1, 16)},
        tensor_plan=tensor_plan,
        transformer_layer_cls=Block,
        fixed={"tensor": 2},
        best=1,
        **CPU,
    )

    assert found == Plan.from_json(found.to_json())
    assert f"tensor_parallelize(model, plan={tensor_plan!r})" in found.script()
    assert "transformer_layer_cls=['Block']" in found.script()
    parallel_state.initialize_debug(tensor_model_parallel_size=2)
    try:
        model = NxDPPModel.from_plan(Stack(), found)
        with pytest.raises(ValueError, match="tensor-parallel parameters already: call tensor_parallelize once"):
            NxDPPModel.from_plan(nxdpp.tensor_parallelize(Stack(), tensor_plan), found)
        with pytest.raises(ValueError, match="is for a Stack in float32, and the model is a NxDPPModel"):
            NxDPPModel.from_plan(model, found)
    finally:
        parallel_state.destroy_model_parallel()
    assert dict(model.local_named_parameters())["layers.0.linear.weight"].shape == (8, 16)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.stack(batch["states"])
        return loss


def test_a_batch_in_containers_has_the_samples_of_a_microbatch() -> None:
    job: dict[str, Any] = {"devices": 1, "global_batch": 8, "fixed": {"microbatch": 4}, "best": 1}
    plan = nxdpp.plan(Nested(), inputs={"batch": STATES}, **job, **CPU)
    flat = nxdpp.plan(Stack(), inputs=STATES, **job, **CPU)

    assert plan.first.memory == flat.first.memory
    assert plan.sample == {"batch['states']": [1, 16]}
    several = {**STATES, "positions": torch.zeros(16)}
    with pytest.raises(ValueError, match=r"several numbers of samples .*: states \[3, 16\], positions \[16\]\. Give"):
        nxdpp.plan(Stack(), devices=1, global_batch=8, inputs=several, **CPU)


def test_several_hosts_have_a_meeting_point() -> None:
    plan = _plan(devices=4, hosts=2, layouts=[Layout(data=4)])

    assert plan.torchrun() == (
        "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint $HOST --nproc-per-node 2 train.py"
    )
