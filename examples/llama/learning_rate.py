"""The learning rate of each step, and advice on losses that it spoils."""

import math


def learning_rate_factor(step: int, steps: int) -> float:
    """Factor of the peak learning rate in step ``step`` of ``steps``, from 0."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2


def advice(step: int) -> str:
    """Cause and remedy of a loss that is not finite in ``step``, from 1."""
    if step > 1:
        return "try a smaller --learning-rate"
    return (
        "no weight was updated yet, so the learning rate is not the cause. Look for weights that are too large or not "
        "finite (--pretrained, initializer_range of --config), and for a batch without labels (all -100)"
    )
