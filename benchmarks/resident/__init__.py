"""How much memory a rank takes, as the kernel counts it."""
