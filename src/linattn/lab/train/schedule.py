"""The learning rate of a training run as a function of the step alone: nothing has to be saved for a resumed run."""

from linattn.lab.train.config import TrainConfig
from linattn.support.schedule import warmed_cosine


def learning_rate(step: int, steps_per_epoch: int, config: TrainConfig) -> float:
    """Linear warm-up to ``lr``, then half a cosine down to ``min_lr``, the rate of the very last step.

    With s = step + 1, W steps of warm-up and T steps in all:

        s <= W:  lr s / W
        s >  W:  min_lr + (lr - min_lr) (1 + cos(pi (s - W) / (T - W))) / 2

    Args:
        step: steps done before this one, counted over all epochs: 0 ... T - 1.

    Example:
        >>> config = TrainConfig(epochs=4, warmup_epochs=1, lr=1.0, min_lr=0.0)
        >>> [round(learning_rate(step, 2, config), 2) for step in range(8)]
        [0.5, 1.0, 0.93, 0.75, 0.5, 0.25, 0.07, 0.0]
    """
    total = config.epochs * steps_per_epoch
    warmup = round(config.warmup_epochs * steps_per_epoch)
    return warmed_cosine(step, total, warmup, config.lr, config.min_lr)
