"""Whether autograd is at work."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread. Local."""
    return torch._C._current_graph_task_id() != -1
