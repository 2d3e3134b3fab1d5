"""Every test starts from the same random state, on one thread."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is decorated: they then run on CPU tensors


@pytest.fixture(autouse=True)
def same_start() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
