"""The learning rate as a function of the step alone, so that a resumed run has nothing to restore."""

import math

from draftmill.recipe import Train


def factor(step: int, settings: Train) -> float:
    """What the learning rate of step `step` (from 1) is multiplied with: up in a line over the warm-up, then the
    schedule.

    Cosine and linear reach zero one step after the last, so that the last step still trains.
    """
    if step <= settings.warmup_steps:
        return step / (settings.warmup_steps + 1)
    if settings.schedule == "constant":
        return 1.0
    done = (step - 1 - settings.warmup_steps) / max(settings.steps - settings.warmup_steps, 1)
    return 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
