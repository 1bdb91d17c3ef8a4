"""Memory of one tensor, and memory that several tensors share."""

import torch

# References to a storage that only one tensor uses: the tensor's own, and the storage object's.
_OWN_USES = 2


def has_own_memory(gradient: torch.Tensor) -> bool:
    """Return whether no other tensor has the memory of ``gradient``.

    Autograd may use it as the ``.grad`` of a parameter too: of positions that are added to a batch of one row. The
    next microbatch adds to that in place, perhaps before this gradient has been sent.
    """
    storage = gradient.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) <= _OWN_USES)
