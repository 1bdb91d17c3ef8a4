"""NxDModel: a model as the trainer wraps it, whether it runs in a pipeline or on one rank."""

from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn

from nxdpp.gradients.gradient_norm import clip_grad_norm
from nxdpp.ground.torch_names import MODULES
from nxdpp.pipeline.local.outer_wrappers import refuse_as_child
from nxdpp.pipeline.model import NxDPPModel
from nxdpp.pipeline.stages.loss import pick_loss
from nxdpp.ranks import parallel_state


class NxDModel(nn.Module):
    """The model of ``initialize_parallel_model``; it lists and loads this rank's part, under its original names.

    Without a pipeline it is called as the model itself. Attributes that it does not have come from the wrapped
    model: ``config``, ``dtype``, ``local_named_parameters``.

    Args:
        module: an ``NxDPPModel``, or the model itself if a pipeline has one rank.
        nxd_config: of ``neuronx_distributed_config``.
        copies: verification of the copies of tensor ranks; it lives as long as the model.
    """

    module: nn.Module
    _of_one_rank: NxDPPModel | None

    def __init__(self, module: nn.Module, nxd_config: Mapping[str, Any], copies: object = None) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self.nxd_config = nxd_config
        self.__dict__["_copies"] = copies
        # Not a submodule: it has the modules of the model.
        self.__dict__["_of_one_rank"] = None

    @property
    def pp_enabled(self) -> bool:
        """``True`` if the model runs in a pipeline of several ranks."""
        return isinstance(self.module, NxDPPModel)

    def local_module(self) -> nn.Module:
        """Return the modules of this rank, without a wrapper."""
        return self.module.local_module if isinstance(self.module, NxDPPModel) else self.module

    def original_module(self) -> nn.Module:
        """Return the whole model. In a pipeline other ranks' parameters are on the meta device."""
        return self.module.original_module if isinstance(self.module, NxDPPModel) else self.module

    @property
    def pipelined(self) -> NxDPPModel | None:
        """The pipeline that runs steps; ``None`` on one rank without a ``pipeline_config``."""
        if isinstance(self.module, NxDPPModel):
            return self.module
        config = self.nxd_config["pipeline_config"]
        if config is not None and self._of_one_rank is None:
            # The optimizer averages, as after a backward of the program's own.
            arguments = {**config, "param_init_fn": None, "use_zero1_optimizer": True}
            self.__dict__["_of_one_rank"] = NxDPPModel(self.module, **arguments)
        return self._of_one_rank

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model, without a pipeline. Raises ``RuntimeError`` in one: ``apply_compile`` compiles it."""
        (self.pipelined or self.module).compile(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. Raises ``RuntimeError`` in a pipeline, which runs by ``run_train`` and ``run_eval``."""
        return self.module(*args, **kwargs)

    def run_train(self, *args: Any, **inputs: Any) -> Any:
        """Run forward and backward of a batch, as ``NxDPPModel.run_train`` does, and return its loss.

        Collective over all ranks in a pipeline. On one rank it is a pipeline of one rank with the ``pipeline_config``;
        without one the batch runs at once, by any arguments of the model. Gradients are then of this replica only,
        and the optimizer averages them.
        """
        steps = self.pipelined
        if steps is not None:
            return steps.run_train(*args, **inputs)
        loss = pick_loss(self.module(*args, **inputs), None)
        loss.backward()
        return loss.detach()

    def run_eval(self, *args: Any, **inputs: Any) -> Any:
        """Run the forward of a batch without gradients, as ``NxDPPModel.run_eval`` does.

        On one rank without a ``pipeline_config`` it returns the loss of the output.
        """
        steps = self.pipelined
        if steps is not None:
            return steps.run_eval(*args, **inputs)
        with torch.no_grad():
            return pick_loss(self.module(*args, **inputs), None)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip by the norm of the whole model, as ``NxDPPModel.clip_grad_norm_``.

        ``NxDOptimizer.step`` clips by itself. Without a pipeline gradients of several replicas are not averaged before
        that step: clipping them is refused with a ``RuntimeError``.
        """
        if isinstance(self.module, NxDPPModel):
            return self.module.clip_grad_norm_(max_norm, norm_type)
        if parallel_state.get_replica_size() > 1:
            raise RuntimeError(
                "the optimizer averages the gradients of the replicas in its step, so they cannot be clipped before "
                "it: the optimizer clips them then (optimizer_config: grad_clipping, max_grad_norm)."
            )
        return clip_grad_norm(self.module.parameters(), max_norm, norm_type)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """This rank's modules under their original names; ``named_parameters`` and ``named_buffers`` use it."""
        yield from self.local_module().named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The immediate children of this rank's modules."""
        yield from self.local_module().named_children()

    def get_submodule(self, target: str) -> nn.Module:
        """The module of this original name; ``get_parameter`` and ``get_buffer`` use it."""
        return self.local_module().get_submodule(target)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's part of the state dict, under its original names; of a pipeline, no pickle takes it."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's part of a state dict, as the wrapped model does."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the model."""
        for steps in (self.module, self._of_one_rank):
            if steps is not None:
                steps.train(mode)
        self.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped model, such as ``config``.

        ``local_parameters``, ``local_named_modules`` and their like are about this rank, with a pipeline or without.
        Raises ``AttributeError`` as the wrapped model does.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = vars(self)[MODULES.name].get("module")
            if module is None or name.startswith("__"):
                raise
        of_rank = name.removeprefix("local_")
        if of_rank != name and hasattr(nn.Module, of_rank) and not self.pp_enabled:
            return getattr(self, of_rank)
        try:
            return getattr(module, name)
        except AttributeError:
            value = getattr(self.original_module(), name, None)
            # In a pipeline a method would meet other ranks' parameters.
            if value is None or callable(value):
                raise
            return value


refuse_as_child(NxDModel)
