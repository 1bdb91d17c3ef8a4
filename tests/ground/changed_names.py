"""A plugin of pytest: torch as a version without ``_assert_async``, and with another ``_detect_is_causal_mask``."""

import torch
from torch.nn.modules import transformer

del torch._assert_async
transformer._detect_is_causal_mask = lambda *given: False
