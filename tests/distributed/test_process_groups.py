"""The process groups that a dedicated model makes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dmuon_core import dedicate_params
from tests.distributed.harness import run_distributed
from tests.distributed.models import MODELS
from tests.distributed.reference import dedicate


def _groups_of_two_models() -> tuple[int, int]:
    counts = []
    for _ in range(2):
        dedicate(MODELS["gpt"]())
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts[0], counts[1]


def test_models_share_process_groups() -> None:
    for first, second in run_distributed(_groups_of_two_models, 2):
        assert first == second


def _timeouts() -> set[float]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    assert mesh.get_group(0)._get_backend(torch.device("cpu")).options._timeout.total_seconds() > 20  # torch's own
    before = set(dist.distributed_c10d._world.pg_map)
    dedicate_params(MODELS["gpt"](), mesh)
    new = set(dist.distributed_c10d._world.pg_map) - before
    return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in new}


def test_no_group_waits_longer_than_the_default_group() -> None:
    """A rank that fails alone between two collectives leaves the others waiting for so long."""
    assert run_distributed(_timeouts, 2, group_timeout=20.0) == [{20.0}, {20.0}]
