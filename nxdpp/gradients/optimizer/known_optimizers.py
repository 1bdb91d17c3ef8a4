"""Table of known optimizers, and declarations of others, by what a step looks at to change one element.

::

    element   this element: its value, gradient and state     AdamW, SGD, Lion
    tensor    the other elements of its tensor too            Muon, Adafactor, LAMB
    all       other tensors too                               LBFGS, SAM, Prodigy
    messages  what other ranks send                           ZeroRedundancyOptimizer

A class is known by its package and name, whatever its module inside the package. A subclass of a known or declared
class is like it unless it overrides what a step may use. No trial could tell instead: a rule that clips, or leaves out
a step, acts only where gradients are large, sudden or not finite.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.gradients.optimizer.sent_messages import refuse_messages, without_hooks

LooksAt = Literal["element", "tensor", "all"]

# Read in torch 2.9 to 2.15, transformers 5.24, bitsandbytes 0.50, pytorch-optimizer 4.1 and timm 1.0.31. With these,
# `python -m pytest -m sweep tests/gradients/optimizer/test_known_optimizers.py` tells which classes are missing.
_KNOWN: Mapping[str, Mapping[str, str]] = {
    "torch": {
        "element": "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD SparseAdam",
        "tensor": "Adafactor Muon",
        "all": "LBFGS",
        "messages": "PostLocalSGDOptimizer ZeroRedundancyOptimizer",
    },
    "transformers": {"tensor": "Adafactor"},
    "bitsandbytes": {
        "element": "Adagrad Adagrad32bit Adam Adam32bit PagedAdam PagedAdam32bit AdamW AdamW32bit PagedAdamW "
        "PagedAdamW32bit AdEMAMix AdEMAMix32bit PagedAdEMAMix PagedAdEMAMix32bit Lion Lion32bit PagedLion "
        "PagedLion32bit RMSprop RMSprop32bit SGD SGD32bit",
        # A block of 256 elements has one scale.
        "tensor": "Adagrad8bit Adam8bit PagedAdam8bit AdamW8bit PagedAdamW8bit AdEMAMix8bit PagedAdEMAMix8bit Lion8bit "
        "PagedLion8bit RMSprop8bit SGD8bit LAMB LAMB8bit LAMB32bit LARS LARS8bit LARS32bit PytorchLARS",
    },
    "pytorch_optimizer": {
        "element": "AccSGD AdEMAMix ADOPT AdaBelief AdaBound AdaDelta AdaMax AdaMod AdaPNM AdaSmooth AdamC AdamG Adan "
        "AggMo Ano BCOS DiffGrad DualAdam EXAdam FOCUS FTRL Grams GrokFastAdamW Kate LaProp Lion Lookahead MADGRAD "
        "MSVAG PAdam PID PNM QHAdam QHM RAdam SGDW SRMM ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD "
        "ScheduleFreeWrapper SignSGD SimplifiedAdEMAMix Tiger VSGD Yogi",
        "tensor": "A2Grad APOLLO AdaFactor AdaGO AdaMuon AdaNorm AdaShift AdaTAM Adalite AdamP AdamWSN Aida Alice Amos "
        "ApolloDQN CAME Conda DASH FAdam Fira FlashAdamW Fromage GaLore Gravity Kron LARS Lamb MARS Magma Muon Nero "
        "NorMuon NovoGrad OrthoGrad RACS ROSE Ranger SCION SCIONLight SGDP SGDSaI SM3 SOAP SPAM SPlus SaRA "
        "ScalableShampoo Shampoo SpectralSphere StableAdamW StableSPAM TAM",
        "all": "ASGD AdaGC AdaHessian AdaLOMO Adai AdamMini AdamS AliG AvaGrad BSAM DAdaptAdaGrad DAdaptAdam "
        "DAdaptAdan DAdaptLion DAdaptSGD EmoFact EmoLynx EmoNavi FriendlySAM GSAM LOMO LoRARite LookSAM MuonClip "
        "PCGrad Prodigy Ranger21 SAM SWATS SafeFP16Optimizer SophiaH TRAC WSAM",
        "messages": "DeMo DistributedMuon",
    },
    "timm": {
        "element": "AdaBelief AdamWLegacy Adan Adopt LaProp Lion Lookahead MADGRAD NAdamLegacy NAdamW RAdamLegacy "
        "RMSpropTF SGDW",
        "tensor": "Adafactor AdafactorBigVision AdamP Kron Lamb Lars Mars Muon NvNovoGrad SGDP",
        "all": "Adahessian",
    },
}
# Options of a group, of the optimizer or of its ``args`` by which a step looks at more.
_WIDER: Mapping[str, tuple[tuple[str, Callable[[Any], bool], LooksAt], ...]] = {
    "bitsandbytes": (("optim_bits", lambda bits: bits == 8, "tensor"), ("max_unorm", bool, "tensor")),
    "pytorch_optimizer": (
        *((name, bool, "tensor") for name in ("adanorm", "cautious", "stable_adamw", "use_gc")),
        ("max_grad_norm", bool, "all"),
    ),
    "timm": (("caution", bool, "tensor"), ("max_grad_norm", bool, "all")),
}
_LOOKS = {
    (package, name): looks_at
    for package, kinds in _KNOWN.items()
    for looks_at, names in kinds.items()
    for name in names.split()
}
_ORDER = ("element", "tensor", "all", "messages")
# Methods that a step does not use, and may be overridden.
_OUTSIDE_OF_STEPS = {"add_param_group", "load_state_dict", "state_dict", "zero_grad"}

_declared = WeakIdKeyDictionary()


class Unknown(NamedTuple):
    """A class whose step nothing tells of; ``reason`` follows its name in a message."""

    reason: str


def declare_optimizer(optimizer_class: type[Optimizer], *, looks_at: LooksAt) -> None:
    """Tell what a step of ``optimizer_class`` looks at, in any step; on every rank, before the first step.

    It is a promise: nothing checks the rule. Subclasses that override nothing of a step have it too::

        nxdpp.declare_optimizer(MyOptimizer, looks_at="element")

    Args:
        optimizer_class: the class of your own, or of a package that nxdpp does not know.
        looks_at: ``"element"`` if the change of an element follows from its own value, gradient and state, and from
            options and the number of steps: this is right over stages, tensor ranks and shards. ``"tensor"`` if other
            elements of its tensor count, such as their norm: right over stages. ``"all"`` if other tensors count, as in
            a common norm, a step that is left out unless all gradients are finite, or the loss: only where a rank has
            the whole model.

    Raises:
        TypeError: for something other than a class of optimizers.
        ValueError: for a different word, a class that nxdpp knows, and one that is declared differently.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"optimizer_class must be a class such as MyOptimizer, not {optimizer_class!r:.80}.")
    name = optimizer_class.__name__
    if looks_at not in get_args(LooksAt):
        words = ", ".join(map(repr, get_args(LooksAt)))
        raise ValueError(f"looks_at={looks_at!r} must be one of {words}: what the step of {name} looks at.")
    if _known(optimizer_class) or _passes_on(optimizer_class):
        package = _package(optimizer_class)
        raise ValueError(f"{name} of {package} is known: leave nxdpp.declare_optimizer({name}, ...) out.")
    if _declared.get(optimizer_class, looks_at) != looks_at:
        raise ValueError(
            f"{name} is declared with looks_at={_declared[optimizer_class]!r}, and cannot have looks_at={looks_at!r} "
            f"too: declare it once."
        )
    if optimizer_class not in _declared:
        refuse_messages(optimizer_class)
    _declared[optimizer_class] = looks_at


def is_declared(optimizer_class: type[Optimizer]) -> bool:
    """Return whether ``optimizer_class``, or a class that it takes its step from, is declared."""
    return any(each in _declared for each in optimizer_class.__mro__)


def looked_at(optimizer: Optimizer, group: Mapping[str, Any]) -> str | Unknown:
    """Return ``element``, ``tensor``, ``all`` or ``messages`` for the steps of ``group`` of ``optimizer``."""
    above: list[type] = []
    is_own = False
    for each in type(optimizer).__mro__[: type(optimizer).__mro__.index(Optimizer)]:
        looks = _declared.get(each) or _known(each)
        if not (looks or _passes_on(each)):
            above.append(each)
            continue
        if changed := _overridden(above, each):
            return Unknown(f"overrides {changed} of {each.__name__}")
        if looks:
            return looks if each in _declared else _with_options(looks, _package(each), optimizer, group)
        above, is_own = [], True
    return "element" if is_own and not above else Unknown("is not known")


def names_of(package: str, *looks_at: str) -> str:
    """Return the names of the classes of ``package`` that look at one of ``looks_at``."""
    return ", ".join(name for each in looks_at for name in _KNOWN[package][each].split())


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _passes_on(kind: type) -> bool:
    """Return whether an optimizer of this package is right, or steps by another one, as accelerate's do."""
    return _package(kind) in ("accelerate", "nxdpp")


def _known(kind: type) -> str | None:
    return _LOOKS.get((_package(kind), kind.__name__))


def _with_options(looks: str, package: str, optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    options = {**vars(optimizer), **getattr(getattr(optimizer, "args", None), "__dict__", {}), **group}
    wider = [more for name, is_on, more in _WIDER.get(package, ()) if name in options and is_on(options[name])]
    return max(looks, *wider, key=_ORDER.index) if wider else looks


def _overridden(subclasses: list[type], base: type) -> str | None:
    """Return the name of something of ``base`` that one of ``subclasses`` overrides and a step may use."""
    for kind in subclasses:
        for name, value in vars(kind).items():
            is_special = name.startswith("__") and name not in ("__getattr__", "__getattribute__")
            is_used = hasattr(base, name) or name == "__getattr__"
            is_code = callable(value) or hasattr(type(value), "__get__")
            if is_special or name in _OUTSIDE_OF_STEPS or not (is_used and is_code):
                continue
            # torch puts a function around the step of the class of the first instance, an inherited one too.
            if without_hooks(value) is not without_hooks(getattr(base, name, None)):
                return f"{name}()" if callable(value) else name
    return None
