"""``apply_compile``: compiled modules of a rank train bit for bit as the same compiled modules of one process."""

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import nn
from torch._dynamo.utils import counters

from nxdpp import NxDPPModel, apply_checkpoint, apply_compile, parallel_state
from nxdpp.pipeline import layer_compilation
from nxdpp.pipeline.activation_checkpoint import is_checkpointed, remove_checkpoint
from nxdpp.pipeline.layer_compilation import check_options, compile_modules
from nxdpp.pipeline.local.view import LocalView
from nxdpp.schedules.families.registry import FAMILIES
from tests.pipeline.runtime.scheduled_models import Chain, copy_of, train_both
from tests.pipeline.runtime.scheduled_models import make as make_small
from tests.pipeline.runtime.scheduled_models import wrap as wrap_small
from tests.pipeline.test_activation_checkpoint import wrapped_layer
from tests.support.models import gradient_differences, make, padded_batch, reference, train_in_one_process
from tests.support.plain_models import WIDTH
from tests.support.run_ranks import run_ranks

OUTSIDE = ("embed_tokens", "norm", "lm_head")


def compiled(whole: Any) -> Any:
    """Compile the modules of the ``whole`` model that ``apply_compile`` compiles on the ranks."""
    torch._dynamo.config.recompile_limit = 64
    for name, module in whole.named_modules():
        above, _, key = name.rpartition(".")
        if (key in OUTSIDE and "layers" not in above) or above.endswith("layers"):
            module.compile(backend="aot_eager")
    return whole


def codes() -> int:
    return int(counters["stats"]["unique_graphs"])


def names_and_codes() -> None:
    """Equal layers have one code, names stay, and a second length compiles once, a third not at all."""
    torch._dynamo.reset()
    counters.clear()
    wrapped = NxDPPModel(make("llama"), num_microbatches=2)
    before = list(wrapped.local_state_dict()), [name for name, _ in wrapped.named_modules()]
    with pytest.raises(ValueError, match=r"torch.compile of torch .* has no \['backed'\]; it takes fullgraph, dynamic"):
        apply_compile(wrapped, backed="aot_eager")
    with pytest.raises(ValueError, match=r"torch.compile refuses {'backend': 'none'}"):
        apply_compile(wrapped, backend="none")
    assert not any(module._compiled_call_impl for module in wrapped.local_modules())
    apply_compile(wrapped, backend="aot_eager")
    assert (list(wrapped.local_state_dict()), [name for name, _ in wrapped.named_modules()]) == before
    done = {name for name, module in wrapped.local_named_modules() if module._compiled_call_impl}
    first, last = {"model.embed_tokens", "model.layers.0", "model.layers.1"}, {"model.norm", "lm_head"}
    assert done == ({"model.layers.2", "model.layers.3"} | last if wrapped.holds_last_stage else first)
    found = []
    for length in (10, 12, 14):
        wrapped.run_train(**padded_batch(4, length))
        found.append(codes())
    kinds = {type(module) for _, module in wrapped.local_named_modules() if module._compiled_call_impl}
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
        kinds -= {nn.Embedding, nn.Linear}  # torch runs them as they are
    # The mode that puts tensors on a device may have codes of its own.
    assert found[0] == len(kinds) or parallel_state.local_device().type != "cpu", found
    assert found[0] < found[1] == found[2], found


def recomputation() -> None:
    # An ordinary backward is first: what it compiles may overwrite what it has saved.
    for schedule in ("1f1b", "zb-h1"):
        model = make("llama", layers=2)
        whole = compiled(reference(model))
        wrapped = NxDPPModel(
            model,
            num_microbatches=4,
            return_mb_loss=True,
            schedule=schedule,
            deallocate_pipeline_outputs=schedule == "zb-h1",
        )
        if schedule == "zb-h1":
            apply_checkpoint(wrapped)
        apply_compile(wrapped, backend="aot_eager")
        batch = padded_batch(8)
        for _ in range(2):
            losses: Any = wrapped.run_train(**batch)
            expected = train_in_one_process(whole, batch, 4)
            assert losses is None or all(map(torch.equal, losses, expected))
            assert not gradient_differences(wrapped, whole)


def small_model(name: str, backend: str, only_blocks: bool = False) -> None:
    model: Any = make_small(Chain, 4)
    whole: Any = copy_of(model)
    chunks = FAMILIES[name].default_chunks
    if only_blocks:
        # The weight-gradients of embedding and head can wait.
        for module in (*whole.blocks, *model.blocks):
            module.compile(backend=backend)
    wrapped = wrap_small(model, 4, schedule=name, virtual_pipeline_size=chunks, return_mb_loss=True)
    if not only_blocks:
        apply_compile(wrapped, backend=backend)
        for module in (whole.embedding, whole.head, *whole.blocks):
            module.compile(backend=backend)
    for step in range(2):
        losses, expected = train_both(wrapped, whole, 4, step)
        assert losses is None or all(map(torch.equal, losses, expected))
    differences = gradient_differences(wrapped, whole)
    assert not differences, (name, only_blocks, differences)


def hooks() -> None:
    """A hook that is registered after the first step runs until it is removed."""
    wrapped = wrap_small(make_small(Chain, 2), 4)
    apply_compile(wrapped, backend="aot_eager")
    own = wrapped.get_submodule(f"blocks.{int(wrapped.holds_last_stage)}")
    for name in ("linear", ""):
        for is_hooked in (False, True, False):
            if is_hooked:
                handle = own.get_submodule(name).register_forward_hook(lambda module, inputs, output: output * 0)
            wrapped.zero_grad()
            wrapped.run_train(x=torch.ones(4, WIDTH))
            if is_hooked:
                handle.remove()
            gradient = own.get_parameter("linear.weight").grad
            assert gradient is not None
            assert bool(gradient.any()) != is_hooked, (name, is_hooked)


def comparison_with_the_module() -> None:
    """Compiled code has other bits than the module."""
    for is_compiled in (True, False):
        wrapped = wrap_small(make_small(Chain, 2), 4, check_against_module="first")
        if is_compiled:
            apply_compile(wrapped, backend="eager")
            with pytest.raises(RuntimeError, match=r"rank 1: its modules are compiled, .* after the first step"):
                wrapped.run_train(x=torch.ones(4, WIDTH))
    wrapped.run_train(x=torch.ones(4, WIDTH))
    apply_compile(wrapped, backend="eager")
    wrapped.run_train(x=torch.ones(4, WIDTH))


def over_two_ranks(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    # A frame that dynamo gives up runs without an error.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    names_and_codes()
    hooks()
    comparison_with_the_module()
    recomputation()
    small_model("zb1p", "aot_eager", only_blocks=True)
    if parallel_state.local_device().type == "cpu":
        # Inductor has no code for the fake accelerator.
        small_model("zb1p", "inductor")


def test_compiled_modules_train_as_in_one_process() -> None:
    run_ranks(2, over_two_ranks)


class Counted(nn.Module):
    """Has statistics, and a count that its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(self.linear(x)).relu() * self.calls  # type: ignore[no-any-return]


def test_a_recomputation_of_compiled_code_has_the_state_of_its_forward() -> None:
    torch.manual_seed(0)
    eager: Any = Counted()
    layer: Any = copy.deepcopy(eager)
    apply_checkpoint(wrapped_layer(eager))
    compile_modules([("0", layer)], {"backend": "aot_eager"})
    apply_checkpoint(wrapped_layer(layer))
    copied = copy.deepcopy(layer)
    assert is_checkpointed(copied)
    assert is_checkpointed(pickle.loads(pickle.dumps(layer)))
    rows = torch.randn(3, 8, WIDTH)
    for each in (eager, layer, copied):
        # All forwards before the first backward.
        for loss in [each(x).square().sum() for x in rows]:
            loss.backward()
    assert layer.calls == copied.calls == 3
    found, of_copy, expected = (
        [*(p.grad for p in each.parameters()), *each.buffers()] for each in (layer, copied, eager)
    )
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, of_copy, expected))
    remove_checkpoint(wrapped_layer(layer))
    assert not is_checkpointed(layer)
    assert layer._compiled_call_impl is not None
    assert "forward" not in vars(layer)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x)).square()  # type: ignore[no-any-return]


def test_dropout_repeats_in_a_recomputation_of_compiled_code() -> None:
    gradients: list[Any] = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        layer = Dropped()
        compile_modules([("0", layer)], {"backend": "aot_eager"})
        if recomputes:
            apply_checkpoint(wrapped_layer(layer))
        torch.manual_seed(1)
        for loss in [layer(x).square().sum() for x in torch.ones(3, 8, WIDTH)]:
            loss.backward()
        gradients.append([parameter.grad for parameter in layer.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize(
    ("given", "of_process", "is_divided", "message"),
    [
        ({"backend": "cudagraphs"}, False, False, "backend='cudagraphs' replays CUDA graphs"),
        ({}, True, False, r"torch\._inductor\.config\.triton\.cudagraphs replays CUDA graphs"),
        ({"backend": "aot_eager", "mode": "default"}, False, False, "leave them out with backend='aot_eager'"),
        ({"mode": "max-autotune-no-cudagraphs"}, False, True, "max_autotune chooses kernels by their times"),
    ],
)
def test_options_that_are_refused(given: dict[str, Any], of_process: bool, is_divided: bool, message: str) -> None:
    with torch._inductor.config.patch({"triton.cudagraphs": of_process}):
        with pytest.raises(ValueError, match=message):
            check_options(given, is_divided=is_divided)
        check_options({"backend": "aot_eager"}, is_divided=is_divided)


def test_an_xla_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "local_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(layer_compilation, "device_of", lambda _: SimpleNamespace(is_lazy=True))
    with pytest.raises(ValueError, match="an XLA device compiles all operations of an action itself"):
        apply_compile(LocalView())
