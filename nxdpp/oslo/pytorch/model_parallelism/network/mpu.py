"""MPU at the path of OSLO's tutorials."""

from nxdpp.doors.oslo.mpu import MPU

__all__ = ["MPU"]
