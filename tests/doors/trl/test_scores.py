"""A model with labels returns TRL's per-token values, and without labels its logits."""

import copy

import torch
from trl.trainer.utils import add_fused_lm_head

from nxdpp.doors.trl.scores import return_scores
from tests.support.models import make, padded_batch

NAMES = ("log_probs", "entropy", "is_top1")


def test_scores_are_those_of_trl() -> None:
    model = make("llama", final_logit_softcapping=2.0, logit_scale=3.0)
    theirs = copy.deepcopy(model)
    add_fused_lm_head(theirs, outputs=NAMES)
    plain = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    batch = padded_batch(3)

    return_scores(model, NAMES)
    scores = model(**batch)
    expected = theirs(**batch, fused_lm_head=True)

    assert list(scores) == [*NAMES, "label_mask"]
    assert all(torch.equal(value, expected[name]) for name, value in scores.items())
    scores["log_probs"].sum().backward()
    expected.log_probs.sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), theirs.parameters(), strict=True))
    assert torch.equal(model(batch["input_ids"]).logits, plain(batch["input_ids"]).logits)
    assert [name for name, _ in model.named_parameters()] == names
