"""Plan of a parallel module in ``gen_savedir``: a JSON file instead of nnScaler's generated code, one for all ranks.

==========  ===============  =====================  ==========================
reuse       no file          the file fits          the file does not fit
==========  ===============  =====================  ==========================
MATCH       a new plan       the plan of the file   RuntimeError
MOO         a new plan       the plan of the file   a new plan; once loaded,
                                                    RuntimeError
GRAPH,      a new plan       a new plan; once       a new plan; once loaded,
OVERRIDE                     loaded, RuntimeError   RuntimeError
==========  ===============  =====================  ==========================

A file fits an equal ``ComputeConfig`` and a module with the same parts, and any policy. It is written under a temporary
name and then renamed: no process sees half a file. All ranks take rank 0's plan::

    rank 0          find or make the file ──┬─ text ─▶ every rank takes the layout
    rank 0 of       new, and a strategy:  ◀─┘
    another host    write the file               then each rank verifies the file of its host

Without ``torch.distributed`` each process does so by itself. Policies are deterministic, so the files are equal.
"""

import enum
import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nxdpp.agreement.comparison import unequal
from nxdpp.doors.nnscaler.compute_config import ComputeConfig
from nxdpp.doors.nnscaler.enums import BroadcastGenFilesStrategy, ReuseType
from nxdpp.doors.nnscaler.unit_layout import UnitLayout
from nxdpp.ranks.exchange import Exchange
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.group_values import gather_values

_FORMAT = 1
_FOLDER = "_parallel_modules"
_DEFAULT_INSTANCE = "_"
_KINDS = (ValueError, TypeError, NotImplementedError)
_loaded: set[Path] = set()


def plan_path(gen_savedir: str | Path, kind: type[nn.Module], instance_name: str | None) -> Path:
    """Return the path of the plan of modules of ``kind``.

    Raises ``ValueError`` or ``TypeError`` for an ``instance_name`` that is not a name.
    """
    name = _DEFAULT_INSTANCE if instance_name is None else instance_name
    if not isinstance(name, str):
        raise TypeError(f"instance_name must be text or None, not {name!r}")
    if not re.fullmatch(r"[\w-]+(\.[\w-]+)*", name):
        raise ValueError(f"instance_name={name!r} must have letters, digits, _ and -, in parts between dots")
    parts = re.sub(r"[^\w.-]", "_", f"{kind.__module__}.{kind.__qualname__}").split(".")
    return Path(gen_savedir).resolve().joinpath(_FOLDER, *parts, *name.split("."), "plan.json")


class SavedPlan:
    """The file of a plan, for one module and configuration.

    Args:
        path: of the file.
        module: the whole module. Only names, classes, shapes and dtypes of its parts are read.
        compute_config: the configuration of ``parallelize``.

    Attributes:
        path: as given.
        compute_config: its fields as values of JSON.

    Raises ``ValueError`` for values of ``pas_config`` and ``user_config`` that a file cannot keep.
    """

    def __init__(self, path: Path, module: nn.Module, compute_config: ComputeConfig) -> None:
        self.path = path
        self.compute_config = {
            field.name: _plain_value(getattr(compute_config, field.name), field.name)
            for field in fields(compute_config)
        }
        self._wanted: dict[str, Any] = {
            "format": _FORMAT,
            "compute_config": self.compute_config,
            "module": {"class": f"{type(module).__module__}.{type(module).__qualname__}", "parts": _hash_of(module)},
        }

    def find_or_make(self, reuse: ReuseType, make: Callable[[], UnitLayout]) -> tuple[UnitLayout, bool]:
        """Return the layout of the file, or of ``make``, and whether it is new. A new one is written to the file.

        A file that ``reuse`` does not take is removed before ``make`` runs. Raises ``RuntimeError`` by the table above.
        """
        content = self.read()
        difference = None if content is None else self._difference(content)
        if reuse is ReuseType.MATCH and difference is not None:
            raise RuntimeError(
                f"{self.path} has a plan that does not fit: {difference}. Remove the file, or give reuse='override' or "
                f"'moo', or another instance_name or gen_savedir"
            )
        if reuse in (ReuseType.MATCH, ReuseType.MOO) and content is not None and difference is None:
            return self.layout_in(content), False
        if self.path in _loaded:
            raise RuntimeError(
                f"the plan {self.path} is in use by a module that this process has loaded, and reuse={reuse.value!r} "
                f"would replace it: give another instance_name, or reuse='match'"
            )
        if content is not None:
            with suppress(FileNotFoundError):
                self.path.unlink()
        layout = make()
        self.write(self.text_of(layout))
        return layout, True

    def note_loaded(self) -> None:
        """Note that this process loads a module by the file."""
        _loaded.add(self.path)

    def read(self) -> str | None:
        """Return the text of the file, or ``None`` if there is none."""
        try:
            return self.path.read_text(errors="replace")
        except FileNotFoundError:
            return None

    def write(self, text: str) -> None:
        """Replace the file by ``text`` at once."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        own = self.path.with_name(f".plan-{socket.gethostname()}-{os.getpid()}")
        own.write_text(text)
        own.replace(self.path)

    def layout_in(self, text: str) -> UnitLayout:
        """Return the layout in the text of a file that fits."""
        return UnitLayout.from_dict(json.loads(text)["layout"])

    def text_of(self, layout: UnitLayout) -> str:
        """Return the text of a file with ``layout``."""
        versions = {name: _version(name) for name in ("nxdpp", "torch", "transformers")}
        content = {**self._wanted, "layout": layout.to_dict(), "versions": versions}
        return json.dumps(content, indent=1) + "\n"

    def _difference(self, text: str) -> str | None:
        """Return why a file does not fit this module and configuration, or ``None``."""
        try:
            content = json.loads(text)
            self.layout_in(text)
            config, module = dict(content["compute_config"]), dict(content["module"])
        except (ValueError, TypeError, KeyError, AttributeError):
            return "it is no whole plan"
        if content.get("format") != _FORMAT:
            return f"its format is {content.get('format')!r}, and this is {_FORMAT}"
        for name, wanted in self.compute_config.items():
            if config.get(name) != wanted:
                return f"its {name} is {config.get(name)!r}, and that of compute_config {wanted!r}"
        if module != self._wanted["module"]:
            return "it is for a module with other parts"
        return None


def shared_layout(
    plan: SavedPlan,
    make: Callable[[], UnitLayout],
    reuse: ReuseType,
    strategy: BroadcastGenFilesStrategy,
    load_module: bool,
) -> UnitLayout:
    """Return the layout of the plan, which is then in the file; collective over the world if there is one.

    Args:
        plan: the file of this process.
        make: makes the layout of a new plan. It runs on rank 0.
        reuse: the plan that may be taken.
        strategy: whether other hosts get a new plan. Without ``torch.distributed`` there are none.
        load_module: whether every host needs the file, because this call loads a module.

    Raises:
        RuntimeError: for a file that does not fit or is in use, by the table above, and for a host without
            the file.
        Exception: an error of ``make``. The other ranks raise it too.
    """
    if not dist.is_initialized():
        return plan.find_or_make(reuse, make)[0]

    def find() -> tuple[str | None, bool]:
        _, is_new = plan.find_or_make(reuse, make)
        return plan.read(), is_new

    # Messages in host memory, whatever the backend of the world.
    with Wait("new process group"):
        group = dist.new_group(backend="gloo")
    try:
        text, is_new = Exchange(group, kinds=_KINDS).from_first(find)
        assert text is not None, "rank 0 has read the file"
        writes = is_new and strategy is not BroadcastGenFilesStrategy.NONE and os.environ.get("LOCAL_RANK", "0") == "0"
        problem = _problem(plan, text, writes) if writes else None
        if load_module:
            with Wait("files of the plan", group):
                dist.barrier(group=group)  # every host has written
            _verify_configs(plan, group)
            _verify_files(problem or _problem(plan, text), is_new, group)
        elif problem is not None:
            raise RuntimeError(problem)
    finally:
        dist.destroy_process_group(group)
    return plan.layout_in(text)


def verify_same_plan(plan: SavedPlan, layout: UnitLayout) -> None:
    """Raise ``RuntimeError`` on all ranks unless each of them has this layout and configuration; collective.

    For ranks that each found or made the plan before ``torch.distributed`` was there.
    """
    _verify_configs(plan)
    found = unequal(plan.text_of(layout))
    if found is not None:
        raise RuntimeError(
            f"rank {found.ranks[1]} has another plan than rank 0 for the same compute_config: give all ranks the same "
            f"module and policy, or call torch.distributed.init_process_group() before parallelize: rank 0's plan is "
            f"then that of all"
        )


def _verify_configs(plan: SavedPlan, *groups: dist.ProcessGroup) -> None:
    """Raise ``RuntimeError`` on all ranks unless each has rank 0's ``compute_config``; collective."""
    first, *others = Exchange(*groups).gather(plan.compute_config)
    for rank, config in enumerate(others, 1):
        for name, value in config.items():
            if value != first[name]:
                raise RuntimeError(
                    f"the ranks gave other compute_configs: on rank {rank} {name} is {value!r}, and {first[name]!r} on "
                    f"rank 0. Give all ranks the same"
                )


def _problem(plan: SavedPlan, text: str, writes: bool = False) -> str | None:
    """Return why the file of this host has not ``text``, or ``None``. With ``writes`` the file gets it."""
    try:
        own = plan.read()
        if writes and own != text:
            plan.write(text)
            return None
    except OSError as error:
        return f"{socket.gethostname()} cannot {'write' if writes else 'read'} {plan.path} ({error})"
    return None if own == text else f"{socket.gethostname()} has {'no' if own is None else 'another'} plan {plan.path}"


def _verify_files(problem: str | None, is_new: bool, group: dist.ProcessGroup) -> None:
    """Raise ``RuntimeError`` on all ranks if one of them has a ``problem``; collective."""
    problems = gather_values(problem, group)
    wrong = next((f"rank {rank} on {each}" for rank, each in enumerate(problems) if each is not None), None)
    if wrong is None:
        return
    remedy = (
        "give broadcast_strategy='all', a gen_savedir that all hosts share, or copy rank 0's file"
        if is_new
        else "rank 0 reuses its plan, and reused plans are not sent: copy its file, or give reuse='override' and "
        "broadcast_strategy='all'"
    )
    raise RuntimeError(f"{wrong}, unlike rank 0: {remedy}")


def _plain_value(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain_value(each, f"{where}[{key!r}]") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, set | frozenset):
        return sorted(str(_plain_value(each, where)) for each in value)
    if isinstance(value, enum.Enum | Path | torch.dtype | torch.device):
        return str(value)
    if hasattr(value, "__qualname__") and "<" not in value.__qualname__:
        return f"{value.__module__}.{value.__qualname__}"
    raise ValueError(
        f"{where} is {value!r:.80}, and a plan file keeps text, numbers, lists, dicts, and functions and classes of a "
        f"module: give one of these"
    )


def _hash_of(module: nn.Module) -> str:
    """Return a hash of the names and classes of modules, and of the shapes and dtypes of tensors."""
    lines = [f"{name}: {type(part).__qualname__}" for name, part in module.named_modules(remove_duplicate=False)]
    for listed in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        lines += [f"{name}: {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in listed]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
