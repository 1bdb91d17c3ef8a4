"""Small models, optimizers and layouts that are drawn by a seed."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

from nxdpp import NxDPPModel, tensor_parallelize
from nxdpp.gradients.optimizer.fp32_adamw import AdamW_FP32OptimParams
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from tests.support.tensor_models import make

RANKS = 4
OPTIMIZERS: list[Callable[..., Optimizer]] = [
    optim.Adagrad,
    optim.Adamax,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    partial(optim.Adam, amsgrad=True),
    partial(optim.ASGD, t0=1),
    partial(optim.SGD, momentum=0.9),
]


@dataclass(frozen=True)
class Drawn:
    """A layout of four ranks, and how the model is cut and divided in it."""

    tensor: int
    pipeline: int
    zero1: bool
    arguments: dict[str, Any]
    parallel: dict[str, Any]


class Case:
    """A model, its optimizer and two layouts, the same on all ranks for a seed.

    Attributes:
        text: for messages.
        layouts: of the training, and of the load.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self._name = draw.choice(("llama", "llama", "mixtral", "gpt2", "t5"))
        self._changes: dict[str, Any] = {}
        if self._name in ("llama", "mixtral"):
            # Vocabularies that do not divide stay whole.
            self._changes = {
                "num_hidden_layers": 4,
                "vocab_size": draw.randint(61, 64),
                "num_key_value_heads": draw.choice((2, 4)),
                "tie_word_embeddings": draw.random() < 0.5,
            }
        elif self._name == "gpt2":
            self._changes = {"layers": 4}
        self._pads = self._name == "llama" and draw.random() < 0.3
        if self._pads:
            self._changes |= {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
        self._is_half = self._name != "mixtral" and draw.random() < 0.3
        self._class = optim.AdamW if self._is_half else draw.choice(OPTIMIZERS)
        self._frozen = draw.random() * 0.3
        self._seed = seed
        self.layouts = self._layout(draw), self._layout(draw)
        self.text = f"{seed}: {self._name} {self._changes} {self._class} {self._is_half} {self.layouts}"

    def build(self) -> nn.Module:
        """The whole model; some parameters are frozen."""
        model: nn.Module = make(self._name, self._seed, **self._changes)
        draw = random.Random(self._seed)
        for parameter in model.parameters():
            parameter.requires_grad_(draw.random() >= self._frozen)
        return model.bfloat16() if self._is_half else model

    def wrapped(self, layout: Drawn) -> tuple[NxDPPModel, Optimizer]:
        """This rank's part and its optimizer; model parallelism is initialised for ``layout``."""
        module = self.build()
        if layout.tensor > 1:
            tensor_parallelize(module, **layout.parallel)
        model = NxDPPModel(module, num_microbatches=2, use_zero1_optimizer=layout.zero1, **layout.arguments)
        model.move_model_to_device()
        return model, self.optimizer(list(model.local_named_parameters()), layout.zero1)

    def optimizer(self, named: list[tuple[str, nn.Parameter]], zero1: bool = False) -> Optimizer:
        """An optimizer of two groups; master copies for half precision."""
        groups = [
            {"params": [parameter for name, parameter in named if "norm" in name], "weight_decay": 0.0},
            {"params": [parameter for name, parameter in named if "norm" not in name], "lr": 0.02},
        ]
        if not zero1:
            return AdamW_FP32OptimParams(groups) if self._is_half else self._class(groups)
        if isinstance(self._class, partial):
            return Zero1Optimizer(groups, self._class.func, grad_clipping=False, **self._class.keywords)  # type: ignore[arg-type]  # a class
        return Zero1Optimizer(groups, self._class, grad_clipping=False)  # type: ignore[arg-type]  # a class

    def _layout(self, draw: random.Random) -> Drawn:
        tensor, pipeline = draw.choice(((1, 1), (1, 2), (2, 1), (2, 1), (2, 2), (2, 2), (1, 4), (4, 1)))
        if not self._pads:
            tensor = min(tensor, self._changes.get("num_key_value_heads", tensor))
        arguments: dict[str, Any] = {}
        if pipeline == 2 and self._name in ("llama", "gpt2"):
            if draw.random() < 0.4:
                arguments = {"virtual_pipeline_size": 2, "schedule": "interleaved"}
            elif self._name == "llama":
                arguments = {"pipeline_cuts": [f"model.layers.{draw.randint(0, 2)}"]}
        parallel: dict[str, Any] = {"pad_heads": True} if self._pads else {}
        if not self._pads and self._name == "llama" and draw.random() < 0.5:
            parallel = {"sequence_parallel": True}
        return Drawn(tensor, pipeline, draw.random() < 0.5, arguments, parallel)
