"""Settings of the distributed tests."""

from __future__ import annotations

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    # The references run in this process and are compared with ranks that have one thread: same blocking, same sums.
    torch.set_num_threads(1)
