"""Import path of OSLO's tutorials: ``nxdpp.oslo.pytorch.model_parallelism.network.mpu``."""
