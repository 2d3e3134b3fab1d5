"""Training: run files, the trainer, and comparisons of recipes (`quatrain train`, `quatrain compare`)."""

from quatrain.train.comparison import Comparison, compare
from quatrain.train.config import RunConfig, load_run
from quatrain.train.loop import Trainer, train

__all__ = ["Comparison", "RunConfig", "Trainer", "compare", "load_run", "train"]
