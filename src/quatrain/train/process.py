"""What a run changes in its process, and puts back: threads, seed, deterministic algorithms, transformers' talk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers.utils import logging

from quatrain.train.config import TrainConfig


@contextlib.contextmanager
def settings(config: TrainConfig) -> Iterator[None]:
    """The process-wide settings of a run; what was there before comes back at the end."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filling = memory.fill_uninitialized_memory
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    # Not warn_only: on CUDA attention's backward is deterministic only where torch may refuse what is not.
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # it would write every empty tensor once more, and change no result
    try:
        with quiet_transformers():
            yield
    finally:
        memory.fill_uninitialized_memory = filling
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_num_threads(threads)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Only errors of transformers are shown: without fused kernels it recommends them anew with every model."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
