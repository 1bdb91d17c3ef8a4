"""Jobs of tensor x pipeline x data x ZeRO-1 parallelism, measured against formulas and against torch."""
