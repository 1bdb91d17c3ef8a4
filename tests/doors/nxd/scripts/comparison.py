"""Groups of parameters as the scripts make them, and a comparison of this rank's parameters with one process."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nxdpp.parallel_layers import parallel_state
from tests.support.local_slice import local_slice

Run = tuple[list[float], list[float], dict[str, torch.Tensor]]
"""Losses, norms and parameters of a training in one process."""


def groups_of(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    no_decay = ["bias", "norm"]
    return [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]


def compare(named: Iterator[tuple[str, nn.Parameter]], whole: dict[str, torch.Tensor]) -> None:
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_size()
    for name, parameter in named:
        full, dim = whole[name], getattr(parameter, "partition_dim", -1)
        stride = getattr(parameter, "partition_stride", 1)
        theirs = full if dim < 0 else local_slice(full, dim, rank, size, stride)
        torch.testing.assert_close(parameter, theirs, rtol=1e-4, atol=1e-5, msg=name)
