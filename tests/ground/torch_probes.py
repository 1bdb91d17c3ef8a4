"""Probes of the private names of torch."""

import pickle
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils.flop_counter import FlopCounterMode

from nxdpp.devices.roofline import FLOP_FORMULAS
from nxdpp.ground import torch_names as names
from nxdpp.ground.torch_names import TorchDispatchMode, pytree
from tests.ground.probe import probe


class Operations(TorchDispatchMode):
    """The operations of a block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@probe(names.PYTREE)
def _containers() -> bool:
    leaves, spec = pytree.tree_flatten({"a": [1, (2,)], "b": None})
    return bool(
        leaves == [1, 2, None]
        and pytree.tree_unflatten(leaves, spec) == {"a": [1, (2,)], "b": None}
        and pytree.tree_map(lambda leaf: leaf, (1, [2])) == (1, [2])
        and pytree.tree_leaves([1, [2]]) == [1, 2]
    )


@probe(names.DISPATCH_MODE, names.SCHEMA)
def _dispatch_mode() -> bool:
    with Operations() as operations:
        torch.zeros(1).add_(1)
    schema = names.SCHEMA.of(operations.seen[-1])
    return bool(schema.is_mutable and schema.arguments[0].alias_info.is_write and schema.arguments[1].name == "other")


@probe(names.DEFAULT_DEVICE)
def _default_device() -> bool:
    found = [names.DEFAULT_DEVICE.found.CURRENT_DEVICE]
    for device in (torch.device("meta"), None):
        torch.set_default_device(device)
        found.append(names.DEFAULT_DEVICE.found.CURRENT_DEVICE)
    return found == [None, torch.device("meta"), None]


@probe(names.NO_DISPATCH_MODES)
def _no_dispatch_modes() -> bool:
    with Operations() as operations, names.NO_DISPATCH_MODES():
        torch.zeros(1)
    return not operations.seen


@probe(names.PARAMETERS, names.BUFFERS, names.MODULES, names.NON_PERSISTENT)
def _registries() -> bool:
    module = nn.Module()
    module.register_parameter("p", None)
    module.register_buffer("b", torch.ones(1), persistent=False)
    module.m = nn.Module()
    names.PARAMETERS.of(module)["p"] = weight = nn.Parameter(torch.ones(1))
    return (
        module.p is weight
        and list(names.BUFFERS.of(module)) == ["b"]
        and names.MODULES.of(module) == {"m": module.m}
        and names.NON_PERSISTENT.of(module) == {"b"}
    )


@probe(names.COMPILED_CALL, names.CALL_WITH_HOOKS)
def _calls() -> bool:
    module = nn.Identity()
    called = []
    module.register_forward_hook(lambda *given: called.append("hook"))
    names.CALL_WITH_HOOKS.of(module)(1)
    names.COMPILED_CALL.set(module, lambda given: given + 1)
    return called == ["hook"] and module(1) == 2


@probe(names.RESET)
def _reset() -> bool:
    attention = nn.MultiheadAttention(2, 1)
    nn.init.zeros_(attention.in_proj_weight)
    names.RESET.of(attention)()
    return bool(attention.in_proj_weight.any())


@probe(*names.HOOKS)
def _hooks() -> bool:
    module = nn.Identity()
    module.register_forward_hook(lambda *given: None)
    module.register_forward_pre_hook(lambda *given: None)
    module.register_full_backward_hook(lambda *given: None)
    module.register_full_backward_pre_hook(lambda *given: None)
    return [len(hooks.of(module)) for hooks in names.HOOKS] == [1, 1, 1, 1]


@probe(names.VERSION)
def _version() -> bool:
    tensor = torch.zeros(1)
    before = names.VERSION.of(tensor)
    tensor.view(1).add_(1)
    return bool(names.VERSION.of(tensor) > before)


@probe(names.STORAGE_ADDRESS, names.STORAGE_USES)
def _storages() -> bool:
    tensor, other = (torch.empty(2, device="meta") for _ in range(2))
    address = names.STORAGE_ADDRESS.of(tensor.untyped_storage())
    storage = torch.empty(2).untyped_storage()
    own = names.STORAGE_USES(names.STORAGE_ADDRESS.of(storage))
    view = torch.empty(0).set_(storage)
    return bool(
        names.STORAGE_ADDRESS.of(tensor[1:].untyped_storage()) == address
        and names.STORAGE_ADDRESS.of(other.untyped_storage()) != address
        and names.STORAGE_USES(names.STORAGE_ADDRESS.of(view.untyped_storage())) > own
    )


@probe(names.NO_TORCH_FUNCTION)
def _without_torch_function() -> bool:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *given: Any, **keywords: Any) -> Any:
            raise AssertionError

    loud = torch.zeros(1).as_subclass(Loud)
    with names.NO_TORCH_FUNCTION():
        return bool(loud.add(1))


@probe(names.FAKE_MODE, names.FILE_OFFSET)
def _fake_load() -> bool:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file.pt"
        torch.save(torch.tensor([1.5]), path)
        with names.FAKE_MODE():
            tensor = torch.load(path, weights_only=True)
        start = names.FILE_OFFSET.of(tensor.untyped_storage())
        return path.read_bytes()[start : start + 4] == torch.tensor([1.5]).numpy().tobytes()


@probe(names.BASE)
def _base() -> bool:
    whole = torch.ones(2)
    return names.BASE.of(whole[:1][:1]) is whole and names.BASE.of(whole) is None


@probe(names.CAUSAL_MASK)
def _causal_mask() -> bool:
    mask, detect = nn.Transformer.generate_square_subsequent_mask(3), names.CAUSAL_MASK.found
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(2, 1, 2), 1, enable_nested_tensor=False)
    with patch(names.CAUSAL_MASK.path, side_effect=detect) as called:
        encoder(torch.ones(3, 1, 2), mask)
    return called.call_count == 1 and detect(mask, None, 3) is True and detect(mask + 1, None, 3) is False


@probe(names.CHECK_WITH)
def _check_with() -> bool:
    with patch(names.CHECK_WITH.path) as check:
        torch._check(False)
        torch._check_tensor_all(torch.tensor([False]))
    return [each.args[:2] for each in check.call_args_list] == [(RuntimeError, False)] * 2


@probe(names.STORAGE_INFO)
def _storage_info() -> bool:
    with TemporaryDirectory() as folder:
        writer = FileSystemWriter(folder)
        writer.set_up_storage_writer(True)
        result = WriteResult(MetadataIndex("a"), 4, names.STORAGE_INFO("file", 1, 4))
        writer.finish(Metadata({"a": BytesStorageMetadata()}), [[result]])
        return b"_StorageInfo" in (Path(folder) / ".metadata").read_bytes()


@probe(names.GROUPED_PRODUCT, names.CPU_ATTENTION, names.CPU_ATTENTION_BACKWARD)
def _operations_that_torch_does_not_count() -> bool:
    query = torch.ones(1, 1, 2, 4, requires_grad=True)
    with FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as flops, Operations() as operations:
        nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    attention = {names.CPU_ATTENTION.found.default, names.CPU_ATTENTION_BACKWARD.found.default}
    return attention <= {*operations.seen} and flops.get_total_flops() > 0 and names.GROUPED_PRODUCT.exists


@probe(names.DEFAULT_STORE)
def _default_store() -> bool:
    return callable(names.DEFAULT_STORE.found)  # called in a world by tests/ranks


@probe(names.CLEAR_SHARDING_CACHE)
def _sharding_cache() -> bool:
    return names.CLEAR_SHARDING_CACHE() is None


@probe(names.COMPILER, names.COMPILATIONS)
def _compilations() -> bool:
    counts, handler = [], names.COMPILER.found

    def backend(graph: Any, inputs: Any) -> Any:
        counts.append(names.COMPILATIONS.of(handler))
        return graph

    torch.compile(torch.neg, backend=backend)(torch.ones(1))
    return (
        names.COMPILER.path.rpartition(".")[0] in sys.modules and counts == [1] and not names.COMPILATIONS.of(handler)
    )


@probe(names.SAVED, names.RAW_SAVED)
def _saved() -> bool:
    leaf = torch.ones(1, requires_grad=True)
    node = (leaf * leaf).grad_fn
    plain, raw = ([name for name in dir(node) if name.startswith(each.name)] for each in (names.SAVED, names.RAW_SAVED))
    is_raw = all(isinstance(getattr(node, name), names.SAVED_TENSOR.found) for name in raw)
    return len(raw) == 2 and is_raw and sum(getattr(node, name) is leaf for name in plain) == 2


@probe(names.ASSERT, names.ASSERT_ASYNC)
def _checks() -> bool:
    names.ASSERT_ASYNC(torch.ones(1), "text")
    return names.ASSERT(True, "text") is None


@probe(names.EXTRA_STATE)
def _extra_state() -> bool:
    class WithState(nn.Module):
        def get_extra_state(self) -> int:
            return 1

    return nn.Sequential(WithState()).state_dict() == {f"0.{names.EXTRA_STATE.name}": 1}


@probe(names.MEMORY_FORMATS, names.LAYOUT)
def _metadata() -> bool:
    properties = TensorProperties()
    found = {(each.__module__, each.__name__) for each in (names.MEMORY_FORMATS.found, names.LAYOUT.found)}
    written = pickle.dumps(properties)
    return all(name.encode() in written for _, name in found) and len(found) == 2


@probe(names.DYNAMO_MARKS)
def _marks_of_the_compiler() -> bool:
    marked = torch.compile(torch.neg, backend="aot_eager", dynamic=True)(torch.ones(3))
    return bool(vars(marked)) and all(name.startswith(names.DYNAMO_MARKS.name) for name in vars(marked))
