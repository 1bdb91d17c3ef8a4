"""The autocast around a step: to float16 only with a scaled loss."""

import pytest
import torch

from nxdpp.gradients.autocast import check_autocast

CPU = torch.device("cpu")


def test_autocast_to_float16_without_a_scaled_loss_is_refused() -> None:
    with torch.autocast("cpu", torch.float16), pytest.raises(RuntimeError, match=r"float16 needs a scaled loss"):
        check_autocast(CPU, is_scaled=False)
    # The remedies of the message.
    with torch.autocast("cpu", torch.float16):
        check_autocast(CPU, is_scaled=True)
    with torch.autocast("cpu", torch.bfloat16):
        check_autocast(CPU, is_scaled=False)
    with torch.autocast("cpu", torch.float16, enabled=False):
        check_autocast(CPU, is_scaled=False)
