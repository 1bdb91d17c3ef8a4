"""Libraries sweep: models of other libraries, cut into three stages and compared with one process."""

import torch
from torch import nn

from tools.zoo.comparison import compare
from tools.zoo.libraries import cases
from tools.zoo.libraries.case import Case
from tools.zoo.sweep import Verdict

STAGES = (3,)
# Two or more rows in a microbatch: some normalise or compare rows.
ROWS = (8, 16)


def judge(library: str, name: str) -> Verdict:
    """Compare one case of ``library`` in train mode, on two batches."""
    case = cases(library)[name]
    try:
        # A function that a module holds would share its tensors with a deep copy.
        model, whole = _build(case), _build(case)
    except Exception as error:
        return Verdict("does not build", f"{type(error).__name__}: {error}")
    batches = [case.batch(torch.Generator().manual_seed(seed), rows) for seed, rows in enumerate(ROWS)]
    given = {} if case.layers is None else {"transformer_layer_cls": case.layers}
    return compare(model, whole, batches, STAGES, given=given)


def _build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build().train()
