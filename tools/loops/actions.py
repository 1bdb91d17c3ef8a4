"""The actions of drawn scripts: what a training script does to a model after it is wrapped.

Each function is a line of a script, the same in one process and on every rank. Its first argument is the ``Training``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tools.loops.models import VOCABULARY, WIDTH, Adapted, Layer, make
from tools.loops.training import Training, values_of


def steps(training: Training, count: int) -> None:
    for _ in range(count):
        training.step()


def optimizer(training: Training, kind: str, groups: str) -> None:
    """Make an optimizer with groups by a rule."""
    named = list(training.wrapped.named_parameters())
    if groups == "trained":
        training.parts = [(training.optimizer_of(kind, [p for _, p in named if p.requires_grad]), 1)]
        return
    undecayed = {
        "all": set(),
        "name": {n for n, _ in named if "embed" in n or "norm" in n},
        "size": {n for n, p in named if p.ndim < 2},
        "type": _of_types(training.wrapped),
    }[groups]
    decayed = {"params": [p for n, p in named if n not in undecayed], "weight_decay": 0.2}
    others = {"params": [p for n, p in named if n in undecayed], "weight_decay": 0.0}
    training.parts = [(training.optimizer_of(kind, [decayed] if groups == "all" else [decayed, others]), 1)]


def optimizers_by_part(training: Training, kind: str, other: str, every: int) -> None:
    """Make an optimizer of the layers, and another of all else that makes one step in ``every`` steps."""
    named = list(training.wrapped.named_parameters())
    of_layers = training.optimizer_of(kind, [{"params": [p for n, p in named if "layers" in n]}])
    of_others = training.optimizer_of(other, [{"params": [p for n, p in named if "layers" not in n]}])
    training.parts = [(of_layers, 1), (of_others, every)]


def _of_types(root: nn.Module) -> set[str]:
    return {
        f"{name}.{parameter}"
        for name, module in root.named_modules()
        if isinstance(module, nn.Embedding | nn.LayerNorm)
        for parameter, _ in module.named_parameters(recurse=False)
    }


def add_group(training: Training, what: str) -> None:
    """Train the parameters of a name, and give those that the optimizer has not to it."""
    known = {id(p) for group in training.groups for p in group["params"]}
    found = [p for n, p in training.wrapped.named_parameters() if what in n]
    for parameter in found:
        parameter.requires_grad_(True)
    if added := [p for p in found if id(p) not in known]:
        training.add_group(added)


def learning_rate(training: Training, factor: float, group: int | None) -> None:
    for each in training.groups if group is None else [training.groups[group]]:
        each["lr"] *= factor


def freeze(training: Training, root: str, by: str, what: str, trained: bool) -> None:
    for _, parameter in _selected(training, root, by, what):
        parameter.requires_grad_(trained)


def initialise(training: Training, root: str, by: str, what: str) -> None:
    """Set values that follow from a parameter's name."""
    with torch.no_grad():
        for name, parameter in _selected(training, root, by, what):
            training.fill(parameter, name)


def scale_values(training: Training, root: str, by: str, what: str) -> None:
    with torch.no_grad():
        for _, parameter in _selected(training, root, by, what):
            parameter.mul_(0.8)


def _selected(training: Training, root: str, by: str, what: str) -> Iterator[tuple[str, Any]]:
    if by == "name":
        yield from [(n, p) for n, p in training.root(root).named_parameters() if what in n]
    elif by == "module":
        yield from training.module.get_submodule(what).named_parameters(what)
    else:
        for name, module in training.root(root).named_modules():
            # Tensor-parallel layers have longer names.
            if type(module).__name__.endswith(what):
                yield from module.named_parameters(name, recurse=False)


def replace(training: Training, what: str, makes_optimizer: bool) -> None:
    """Replace a module by a new one of the same kind."""
    made: nn.Module
    if what == "head":
        made = nn.Linear(WIDTH, VOCABULARY, bias=False)
    elif what == "embed":
        made = nn.Embedding(VOCABULARY + 2, WIDTH)
    elif what.endswith("norm"):
        made = nn.LayerNorm(WIDTH, eps=0.1)
    elif what.endswith("side"):
        made = nn.Linear(WIDTH, WIDTH)
    else:
        made = Layer(training.script.kind)
    _set(training, what, made, makes_optimizer)


def adapt(training: Training, what: str, makes_optimizer: bool) -> None:
    """Put an adapter around a linear layer."""
    base = _unadapted(training.module.get_submodule(what))
    _set(training, what, Adapted(base), makes_optimizer)


def _unadapted(module: Any) -> Any:
    return module.base if isinstance(module, Adapted) else module


def _set(training: Training, what: str, made: nn.Module, makes_optimizer: bool) -> None:
    made.double()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if not name.startswith("base."):
                training.fill(parameter, f"new.{name}")
    training.module.set_submodule(what, made)
    if makes_optimizer:
        optimizer(training, "AdamW", "all")


def replace_parameter(training: Training, what: str) -> None:
    owner, _, name = what.rpartition(".")
    module = _unadapted(training.module.get_submodule(owner))
    made = nn.Parameter(torch.empty(getattr(module, name).shape, dtype=torch.float64))
    with torch.no_grad():
        training.fill(made, what)
    setattr(module, name, made)
    optimizer(training, "AdamW", "all")


def tie(training: Training, makes_optimizer: bool) -> None:
    _unadapted(training.module.head).weight = training.module.embed.weight
    if makes_optimizer:
        optimizer(training, "AdamW", "all")


def gradient_hook(training: Training, root: str, by: str, what: str, kind: str) -> None:
    """Register hooks of parameters that change gradients."""
    for _, parameter in list(_selected(training, root, by, what)):
        if not parameter.requires_grad:
            continue
        if kind == "after":
            parameter.register_post_accumulate_grad_hook(_clamp)
        else:
            parameter.register_hook((lambda g: g.clamp(-0.01, 0.01)) if kind == "clamp" else (lambda g: g * 0.5))


def _clamp(parameter: Any) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


def forward_hook(training: Training, what: str, kind: str) -> None:
    """Register a hook of a module that changes or adds up what it sees."""
    module = training.module.get_submodule(what)
    if kind == "output":
        module.register_forward_hook(lambda module, inputs, output: output * 0.5)
    elif kind == "input":
        module.register_forward_pre_hook(
            lambda module, inputs: (inputs[0] * 0.5 if inputs[0].is_floating_point() else inputs[0],)
        )
    else:
        seen: list[float] = []
        module.register_forward_hook(lambda module, inputs, output: seen.append(float(output.detach().sum())))


def mode(training: Training, root: str, what: str, trains: bool) -> None:
    chosen = training.module.get_submodule(what) if what else training.root(root)
    chosen.train(trains)


def evaluate(training: Training, switches: bool) -> None:
    before = training.module.training
    if switches:
        training.wrapped.eval()
    training.evaluate()
    if switches:
        training.wrapped.train(before)


def evaluate_rows(training: Training, rows: int, everywhere: bool) -> None:
    """Evaluate rows that need not divide into the microbatches, unless the script splits them."""
    before = training.module.training
    training.wrapped.eval()
    training.evaluate(rows * training.script.microbatches if training.script.mixes_rows else rows, everywhere)
    training.wrapped.train(before)


def microbatches(training: Training, count: int | None) -> None:
    """Give a number of microbatches in each step from here on, which need not be the wrapper's."""
    training.count = count


def mix_rows(training: Training, with_signal: str, cut: int) -> None:
    """Leave floats out of some microbatches from here on, and ``cut`` tokens of each row out of every second one."""
    training.with_signal, training.cut = with_signal, cut


def clip(training: Training, norm: float | None, kind: str) -> None:
    training.clip = (norm, kind)


def save_and_load(training: Training, steps: int, makes: bool) -> None:
    """Save, train, and load what was saved, with new optimizers of the same groups where it ``makes`` one."""
    training.save()
    for _ in range(steps):
        training.step()
    if makes:
        training.remake_optimizers()
    training.load()


def files(training: Training, way: str) -> None:
    training.note_files(way)


def state(training: Training, root: str) -> None:
    """Compare the state dict of a module."""
    training.note("state dict", training.root(root).state_dict())


def load_values(training: Training, root: str, what: str) -> None:
    """Load values for all names, or for names of a part."""
    whole = make(training.script.kind).state_dict()
    for name, value in whole.items():
        value.copy_(values_of(name, value.shape))
    values = {name: value for name, value in whole.items() if what in name}
    training.root(root).load_state_dict(values, strict=not what)


def buffer(training: Training, what: str, kind: str) -> None:
    owner, _, name = what.rpartition(".")
    module = training.module.get_submodule(owner)
    made = torch.full_like(getattr(module, name), 0.7, device="cpu")
    if kind == "fill":
        getattr(module, name).fill_(0.7)
    elif kind == "assign":
        setattr(module, name, made)
    else:
        module.register_buffer(name, made)


def accumulate(training: Training, count: int, syncs: bool) -> None:
    training.accumulate = (count, syncs)


def keep_gradients(training: Training, how: str) -> None:
    training.zeroes = how


def recompute(training: Training) -> None:
    training.recompute()


def attribute(training: Training, what: str, value: float) -> None:
    training.module.get_submodule(what).factor = value


def enable_adapters(training: Training, enabled: bool) -> None:
    for module in training.module.modules():
        if isinstance(module, Adapted):
            module.enabled = enabled


def batch(training: Training, rows: int, length: int) -> None:
    training.rows, training.length = training.script.rows * rows, length


def remember(training: Training, root: str, steps: int) -> None:
    """Keep copies of all parameters, train, and put the mean of both back."""
    kept = {name: parameter.detach().clone() for name, parameter in training.root(root).named_parameters()}
    for _ in range(steps):
        training.step()
    with torch.no_grad():
        for name, parameter in training.root(root).named_parameters():
            parameter.copy_((parameter + kept[name]) / 2)
