"""Training on a pipeline of all ranks, in which one rank has a fault: ``faulty_program.py FAULT RANK HANG_TIMEOUT``.

A fourth argument ``xla`` is for XLA devices, ``fake`` for fake accelerators, where the program reads the loss of each
step, ``shards`` for two replicas of two stages whose parameters are gathered for each microbatch, ``experts`` for two
replicas of two stages whose layers send tokens to experts. The faults are the functions below. ``in_layer`` ones happen
in a forward of step 3, ``in_backward`` ones in a backward of it, the others after step 3. With ``FAULTY_CHECKPOINTS``,
a folder, step 2 is saved. A restart by torchrun has no fault: it loads step 2, if there is one, and tells when it has
trained a step.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

STEPS = 6
FAULTY_STEP = 3


def fails_now() -> None:
    """Tell the time of the fault; the program's reader counts from there."""
    os.write(1, f"\nfault at {time.time()}\n".encode())


def _signal(number: int) -> Callable[[], None]:
    def send() -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    return send


def _killed() -> None:
    fails_now()
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise ValueError("the first error")


def loop_in_a_layer() -> None:
    """Loop without an end."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        pass


def sleep_in_a_layer() -> None:
    """Sleep, in effect without an end."""
    time.sleep(60)


IN_LAYER: dict[str, Callable[[], None]] = {
    "exception": _raise,
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGSEGV": _signal(signal.SIGSEGV),
    "SIGSTOP": _signal(signal.SIGSTOP),
    "os._exit": lambda: os._exit(0),
    "sys.exit in a layer": lambda: sys.exit(0),
    "SIGINT": _signal(signal.SIGINT),
    "loop": loop_in_a_layer,
    "sleep": sleep_in_a_layer,
}
IN_BACKWARD: dict[str, Callable[[], None]] = {
    "exception in a backward": _raise,
    "loop in a backward": loop_in_a_layer,
}
BETWEEN_STEPS: dict[str, Callable[[], None]] = {
    "exception between steps": _raise,
    "SIGKILL between steps": _signal(signal.SIGKILL),
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(3)": lambda: sys.exit(3),
}
# The faulty rank compiles a graph for seconds in step 3.
KILLED_LATER = "SIGKILL in a compilation"
COMPILES = "compiles long", KILLED_LATER
KILL_SECONDS = 1.0
# The other ranks make a collective call of torch or of nxdpp, which the faulty rank does not reach.
BEFORE_A_COLLECTIVE: dict[str, tuple[Callable[[], None], str]] = {
    "sys.exit(0) before a barrier": (lambda: sys.exit(0), "barrier"),
    "sys.exit(0) before an exchange": (lambda: sys.exit(0), "exchange"),
    "exception before an exchange": (_raise, "exchange"),
}
# Calls of a rank whose gather of parameters, or whose tokens, are on their way.
IN_GATHER: dict[str, Callable[[], None]] = {
    "SIGKILL in a gather": _signal(signal.SIGKILL),
}
AMONG_TOKENS: dict[str, Callable[[], None]] = {
    "SIGKILL among tokens": _signal(signal.SIGKILL),
    "exception among tokens": _raise,
    "loop among tokens": loop_in_a_layer,
}
SKIPS = "skips an asynchronous collective"
STEPS_OFF = {"one step more": 1, "one step fewer": -1}


def fails_in_gathers(fault: Callable[[], None]) -> None:
    """Let gathers of ``fully_shard`` on this rank start, and have the fault then."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    gather = DefaultAllGather.__call__

    def start(self: DefaultAllGather, *arguments: Any, **named: Any) -> Any:
        work = gather(self, *arguments, **named)
        fails_now()
        fault()
        return work

    DefaultAllGather.__call__ = start  # type: ignore[method-assign]  # The rank ends with it.


def fails_among_tokens(fault: Callable[[], None]) -> None:
    """Let tokens of this rank leave for their experts, and have the fault then."""
    send = torch.distributed.all_to_all_single

    def start(output: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        work = send(output, *arguments, **named)
        # Their numbers go first.
        if output.is_floating_point():
            fails_now()
            fault()
        return work

    torch.distributed.all_to_all_single = start


class Experts(nn.Module):
    """Four experts that scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Map ``(N, 8)`` to ``(N, 8)``."""
        return (self.weight[chosen] * weights.unsqueeze(-1)).sum(dim=1) * x


class Layer(nn.Module):
    """A layer that has the fault when it is told to."""

    def __init__(self, has_experts: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.experts = Experts() if has_experts else None
        self.fault: Callable[[], None] | None = None
        self.fault_in_backward: Callable[[], None] | None = None
        self.seconds = 0.0
        self.sorts = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(B, 8)`` to ``(B, 8)``."""
        for size in range(2, 2 + self.sorts):
            # XLA compiles the sort of each size.
            x = x + x.repeat(1, self.sorts)[:, :size].sort(dim=-1)[0].mean()
        if self.fault is not None:
            fails_now()
            self.fault()
        time.sleep(self.seconds)
        out: torch.Tensor = self.linear(x).relu()
        if self.experts is not None:
            weights, chosen = torch.cat([x[:, :2], out[:, :2]], dim=1).topk(2)
            out = out + self.experts(out, chosen, weights)
        if self.fault_in_backward is not None:
            out.register_hook(self._fail_in_backward)
        return out

    def _fail_in_backward(self, gradient: torch.Tensor) -> None:
        fails_now()
        assert self.fault_in_backward is not None
        self.fault_in_backward()


class Model(nn.Module):
    """Layers and a loss."""

    def __init__(self, layers: int, has_experts: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(has_experts) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(B, 8)`` to a loss of shape ()."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def main() -> None:
    """Run the program."""
    fault, faulty, hang_timeout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    has_fault = rank == faulty and not is_again
    if has_fault and fault == "ImportError before the start":
        fails_now()
        raise ImportError("no module of that name")
    fourth = sys.argv[4] if len(sys.argv) > 4 else None
    has_shards, has_experts = fourth == "shards", fourth == "experts"
    device = fourth if fourth in ("xla", "fake") else None
    if device == "xla":
        os.environ["PJRT_DEVICE"] = "CPU"
    if device == "fake":
        from tests.support import fake_device

        fake_device.install()
    import nxdpp
    from nxdpp import NxDPPModel, has_checkpoint, load_checkpoint, parallel_state, save_checkpoint
    from nxdpp.ranks.exchange import Exchange

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2 if has_shards or has_experts else ranks,
        expert_model_parallel_size=2 if has_experts else 1,
        device=device,
        hang_timeout=hang_timeout,
    )
    torch.manual_seed(0)
    module = Model(ranks, has_experts)
    if has_experts:
        nxdpp.expert_parallelize(module, {"layers.*.experts.weight": "grouped_gemm"})
    model = NxDPPModel(
        module,
        transformer_layer_cls=Layer,
        num_microbatches=4,
        output_loss_value_spec=True,
        broadcast_and_average_loss=device == "fake",
    )
    model.move_model_to_device()
    if has_shards:
        nxdpp.fully_shard(model, reshard_after_forward=True)
    steps = STEPS + (STEPS_OFF.get(fault, 0) if has_fault else 0)
    first, checkpoints = 1, os.environ.get("FAULTY_CHECKPOINTS")
    if checkpoints and has_checkpoint(checkpoints):
        load_checkpoint(checkpoints, "2", model)
        first = FAULTY_STEP
    for step in range(first, steps + 1):
        layer, *_ = (module for module in model.local_module.modules() if isinstance(module, Layer))
        if has_fault and step == FAULTY_STEP:
            layer.fault, layer.fault_in_backward = IN_LAYER.get(fault), IN_BACKWARD.get(fault)
            if fault in IN_GATHER:
                fails_in_gathers(IN_GATHER[fault])
            if fault in AMONG_TOKENS:
                fails_among_tokens(AMONG_TOKENS[fault])
        if step == FAULTY_STEP:
            layer.sorts = 40 if has_fault and fault in COMPILES else 0
            if has_fault and fault == KILLED_LATER:
                threading.Timer(KILL_SECONDS, _killed).start()
        else:
            layer.sorts = 0
        layer.seconds = 0.5 * hang_timeout if fault == "slow" and has_fault and step == 2 else 0.0
        loss = model.run_train(x=torch.ones(8, 8))
        if device == "fake":
            # Here a program stands while its device waits.
            float(loss)  # type: ignore[arg-type]
        if checkpoints and step == FAULTY_STEP - 1:
            save_checkpoint(checkpoints, "2", model)
        if step == first and is_again:
            print(f"trains again at {time.time()}", flush=True)
        if has_fault and step == FAULTY_STEP:
            print(f"rank {rank} compiled for {model.last_compile_seconds} s", flush=True)
            if fault == "evaluates alone":
                time.sleep(3 * hang_timeout)
            elif fault in BETWEEN_STEPS:
                fails_now()
                BETWEEN_STEPS[fault]()
        if fault == SKIPS and step == FAULTY_STEP and has_fault:
            fails_now()
        elif fault == SKIPS:
            # Both the collective and its wait let the host go on.
            work = torch.distributed.all_reduce(torch.ones(4, device=device), async_op=True)
            assert work is not None
            work.wait()
        if step == FAULTY_STEP and fault in BEFORE_A_COLLECTIVE:
            fail, collective = BEFORE_A_COLLECTIVE[fault]
            if has_fault:
                fails_now()
                fail()
            if collective == "barrier":
                torch.distributed.barrier()
            else:
                Exchange().gather(rank)
    if fault in STEPS_OFF and not is_again:
        fails_now()
    print(f"rank {rank} ends well", flush=True)


if __name__ == "__main__":
    main()
