"""NeuronZero1Optimizer: NeuronX Distributed's name and arguments over ``Zero1Optimizer``."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from nxdpp.ranks import parallel_state
from nxdpp.tensor import checkpointing

_Groups = Sequence[Sequence[int]]


class NeuronZero1Optimizer(Zero1Optimizer):
    """``Zero1Optimizer`` with the arguments of NeuronX Distributed's class of this name.

    Args:
        params, optimizer_class, optimizer_dtype, grad_clipping, defaults: as of ``Zero1Optimizer``.
        max_norm: largest norm of the gradients; ``None`` is 1.0.
        pin_layout: no meaning here: there is no compiled graph whose layout could change.
        sharding_groups: the data-parallel groups, which are the default. Others are refused.
        grad_norm_groups: the tensor-parallel or model-parallel groups. The norm is always that over all ranks.
        lazy_init: ``False``.
        bucket_cap_mb_all_gather, bucket_cap_mb_reduce_scatter: largest size of a message, in MiB; 0 is 25. One layout
            serves both, so two sizes must be equal.
        use_grad_acc_hook: gradients of half parameters accumulate in float32, which needs torch 2.10.
        save_master_weights: ``True`` or ``False``; ``state_dict`` always has the master copies.
        higher_cc_precision: gradients in half precision are averaged in float32.

    Raises ``ValueError`` for an argument that cannot be honoured, and otherwise as ``Zero1Optimizer`` does.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        pin_layout: bool = True,
        sharding_groups: _Groups | None = None,
        grad_norm_groups: _Groups | None = None,
        lazy_init: bool = False,
        bucket_cap_mb_all_gather: float = 0,
        bucket_cap_mb_reduce_scatter: float = 0,
        use_grad_acc_hook: bool = False,
        save_master_weights: bool = False,
        higher_cc_precision: bool = False,
        **defaults: Any,
    ) -> None:
        data = parallel_state.get_replica_group(as_list=True)
        _check_groups("sharding_groups", sharding_groups, {"data-parallel groups": data})
        norms = {
            "tensor-parallel groups": parallel_state.get_tensor_model_parallel_group(as_list=True),
            "model-parallel groups": parallel_state.get_model_parallel_group(as_list=True),
        }
        _check_groups("grad_norm_groups", grad_norm_groups, norms)
        if lazy_init:
            raise ValueError("lazy_init=True is not supported: make the optimizer after move_model_to_device().")
        sizes = {size for size in (bucket_cap_mb_all_gather, bucket_cap_mb_reduce_scatter) if size}
        if len(sizes) > 1:
            raise ValueError(
                f"bucket_cap_mb_all_gather={bucket_cap_mb_all_gather} and bucket_cap_mb_reduce_scatter="
                f"{bucket_cap_mb_reduce_scatter} differ, and one layout serves both: give the same number."
            )
        super().__init__(
            params,
            optimizer_class,
            optimizer_dtype,
            grad_clipping,
            max_norm,
            bucket_cap_mb=sizes.pop() if sizes else 25,
            accumulated_dtype=torch.float32 if use_grad_acc_hook else None,
            averaged_dtype=torch.float32 if higher_cc_precision else None,
            **defaults,
        )

    def init_zero(self) -> None:
        """Do nothing: the next step takes new values of the parameters, as of a load, by itself."""

    def save_sharded_state_dict(self, output_dir: str | os.PathLike[str], num_workers_per_step: int = 8) -> None:
        """Write this rank's ``state_dict`` to a file of its own in ``output_dir``; collective over all ranks.

        ``save_checkpoint`` writes what any layout of ranks loads. ``num_workers_per_step`` is without effect: the
        ranks write one after the other. Raises as ``parallel_layers.save`` does.
        """
        checkpointing.save(dict(self.state_dict()), output_dir, master_dp_only=False)

    def load_sharded_state_dict(self, output_dir: str | os.PathLike[str], num_workers_per_step: int = 8) -> None:
        """Load what ``save_sharded_state_dict`` has written in the same layout of ranks; not collective.

        Raises as ``load_state_dict`` and ``parallel_layers.load`` do.
        """
        checkpointing.load(output_dir, self, model_key=None, master_dp_only=False)


def _check_groups(argument: str, given: _Groups | None, allowed: Mapping[str, _Groups]) -> None:
    if given is None:
        return
    sets = {frozenset(group) for group in given}
    if not any(sets == {frozenset(group) for group in groups} for groups in allowed.values()):
        names = " or the ".join(f"{name} {[sorted(group) for group in groups]}" for name, groups in allowed.items())
        raise ValueError(
            f"{argument}={[list(group) for group in given]} are other ranks than the {names}: leave it out."
        )
