"""nnScaler's import path of its optimizers with float32 copies of half parameters."""

from nxdpp.doors.nnscaler.f16_optimizer import MixedPrecisionAdam as MixedPrecisionAdam
from nxdpp.doors.nnscaler.f16_optimizer import MixedPrecisionAdamW as MixedPrecisionAdamW
