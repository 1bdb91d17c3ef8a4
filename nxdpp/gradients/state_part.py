"""State dicts with one rank's part of a model or of an optimizer's state, which are not written as the whole.

::

    state = model.state_dict()                     19 of 39 tensors
    state["lm_head.weight"], state.items()         as in any dict
    model.load_state_dict(state)                   as any state dict
    copy.deepcopy(state)                           the best weights so far, on every rank: a part, too
    torch.save(state), torch.save({"model": state})    refused, on each rank
    dict(state)                                    an ordinary dict, for a file of each rank

A key of another rank is a ``KeyError`` that says so: a loop of an average over the names of the whole model ends there.
"""

import copy
import inspect
from collections import OrderedDict
from collections.abc import ItemsView, Iterable
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.shards.local_tensors import is_sharded
from nxdpp.ranks import parallel_state

OF_MODEL = (
    "model.state_dict() has the {} tensors of this rank's part of the model, and a file or a pickle of them would be "
    "taken for the whole. On every rank call nxdpp.save_checkpoint, which any layout resumes, or "
    "nxdpp.save_pretrained(model, directory). Or save model.local_state_dict() in a file for each rank."
)
OF_OPTIMIZER = (
    "optimizer.state_dict() has the state of {} parameters, those of this rank's part of the model, and a file or a "
    "pickle of it would be taken for the whole. On every rank call nxdpp.save_checkpoint with the model and the "
    "optimizer, which any layout resumes (nxdpp.save_pretrained(model, directory) writes the weights alone). Or save "
    "dict(optimizer.state_dict()), beside model.local_state_dict(), in a file for each rank."
)
_marked = WeakIdKeyDictionary()
_SAVES = ("save", "save_file", "save_model")
# A save of safetensors lists the items in a function of its own.
_DEPTH = 3


class StatePart(OrderedDict[str, Any]):
    """A state dict of one rank's part. Pickles and files of safetensors raise ``RuntimeError`` with ``refusal``.

    Attributes:
        refusal: the reason and the remedies; that of a model in what ``type(state)(...)`` and ``state | other`` make.
    """

    refusal: str = OF_MODEL.replace("the {} tensors", "tensors")

    @classmethod
    def of(cls, state: dict[str, Any], refusal: str) -> "StatePart":
        """Return the entries of ``state``, and its attributes, such as the versions of modules."""
        part = cls(state)
        vars(part).update(getattr(state, "__dict__", {}), refusal=refusal)
        return part

    def copy(self) -> "StatePart":
        """Return a shallow copy, a part too; ``Module.load_state_dict`` makes one."""
        return self.of(self, self.refusal)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> "StatePart":
        made = memo[id(self)] = self.of({key: copy.deepcopy(self[key], memo) for key in self}, self.refusal)
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __missing__(self, key: str) -> NoReturn:
        raise KeyError(f"{key!r} is not in this rank's part, or not in the model. {self.refusal}")

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]  # a view as OrderedDict's
        """The entries. Raises ``RuntimeError`` in a save of safetensors, which would write them."""
        frame = inspect.currentframe()
        for _ in range(_DEPTH):
            frame = frame and frame.f_back
            if frame is None:
                break
            if frame.f_globals.get("__name__") == "safetensors.torch" and frame.f_code.co_name in _SAVES:
                raise RuntimeError(self.refusal)
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(self.refusal)


def is_divided(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether this rank has only a part of ``parameters``, or of the model that they are of."""
    if parallel_state.get_pipeline_model_parallel_size() > 1:
        return True
    tensor_ranks = parallel_state.get_tensor_model_parallel_size()
    return any(
        is_sharded(each) or is_of_experts(each) or (tensor_ranks > 1 and getattr(each, "tensor_model_parallel", False))
        for each in parameters
    )


def mark_states_of(optimizer: Optimizer) -> None:
    """Make ``optimizer.state_dict()`` return a part from now on."""
    if optimizer in _marked:
        return
    _marked[optimizer] = True
    optimizer.register_state_dict_post_hook(part_of_optimizer)


def part_of_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> StatePart:
    """Return the ``state`` of this rank's parameters as a part."""
    return StatePart.of(state, OF_OPTIMIZER.format(sum(len(group["params"]) for group in optimizer.param_groups)))
