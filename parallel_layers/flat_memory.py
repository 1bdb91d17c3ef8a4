"""Memory of flat copies of gradients, kept from step to step.

On the CPU new memory of that size comes from the kernel, page by page, which takes longer than the copy.
"""

import torch


class FlatMemory:
    """Memory for copies. As many pieces are kept as there were copies at one time."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, device: torch.device, count: int) -> torch.Tensor:
        """Return ``count`` bytes on ``device``, uint8: the smallest free memory that has them, or new memory."""
        fitting = [each for each in self._free if each.numel() >= count and each.device == device]
        if not fitting:
            # Other buckets than before: the new piece takes the place of one that is too small.
            self._free = self._free[1:]
            return torch.empty(count, dtype=torch.uint8, device=device)
        chosen = min(fitting, key=torch.Tensor.numel)
        self._free = [each for each in self._free if each is not chosen]
        return chosen[:count]

    def give_back(self, copy: torch.Tensor) -> None:
        """Free the memory of ``copy``, which was made in what ``take`` returned."""
        storage = copy.untyped_storage()
        self._free.append(torch.empty(0, dtype=torch.uint8, device=copy.device).set_(storage))
