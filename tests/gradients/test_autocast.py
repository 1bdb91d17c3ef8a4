"""The autocast around a step: of its device, and to float16 only with a scaled loss."""

import pytest
import torch

from nxdpp.gradients.autocast import check_autocast, note_blocks_that_are_off

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch switches autocast to CUDA off only where it is absent")
def test_a_block_that_torch_switches_off_is_refused_inside_it() -> None:
    note_blocks_that_are_off()
    with pytest.warns(UserWarning, match="Disabling"):
        kept = torch.autocast("cuda")
    for _ in range(2):
        check_autocast(CPU, is_scaled=False)
        with kept, pytest.raises(RuntimeError, match=r"in torch.autocast\('cuda', torch.float16\) and runs on cpu"):
            check_autocast(CPU, is_scaled=False)
    with kept, torch.autocast("cpu"):
        check_autocast(CPU, is_scaled=False)
    del kept
    with torch.autocast("cuda", torch.bfloat16, enabled=False):
        check_autocast(CPU, is_scaled=False)
