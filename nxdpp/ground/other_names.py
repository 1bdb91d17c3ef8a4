"""Private names of peft and einops, by what nxdpp does with them. A use follows the word nxdpp in a message."""

from nxdpp.ground.names import PrivateAttribute, PrivateName

# An adapted model as its own reference. peft's methods for it would change which adapters train.
ACTIVE_ADAPTER = PrivateAttribute(
    "peft.tuners.tuners_utils.BaseTunerLayer._active_adapter", "runs the reference of DPO in an adapter of its own"
)
DISABLE_ADAPTERS = PrivateAttribute(
    "peft.tuners.tuners_utils.BaseTunerLayer._disable_adapters", "runs the reference of DPO without adapters"
)

APPLY_RECIPE = PrivateName("einops.einops._apply_recipe", "records rearrangements of einops between layers")
TORCH_BACKEND = PrivateName("einops._backends.TorchBackend", "records rearrangements of einops between layers")
