"""Every test starts from the same random state, on one thread."""

import pytest
import torch


@pytest.fixture(autouse=True)
def same_start() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
