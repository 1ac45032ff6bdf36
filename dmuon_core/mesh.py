"""Which device mesh the owners live on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def data_parallel_mesh(mesh: DeviceMesh | None, replicate_mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh to use for these arguments of :func:`dmuon_core.dedicate_params`: 1-D, or 2-D (replicate, shard).

    Collective over the default group if it makes a mesh.

    Raises:
        ValueError: the arguments do not describe such a mesh.
    """
    if mesh is None:
        if replicate_mesh is not None:
            raise ValueError("replicate_mesh without mesh: pass mesh=mesh['shard'], replicate_mesh=mesh['replicate']")
        return _default_mesh()
    if replicate_mesh is not None:
        return _join(mesh, replicate_mesh)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"dedicate_params needs a 1-D mesh or a 2-D (replicate, shard) mesh, got {mesh.ndim} dimensions "
            f"{mesh.mesh_dim_names}: pass the data-parallel part, such as mesh['shard']"
        )
    return mesh


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device of this rank on ``mesh``. Local."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _join(shard: DeviceMesh, replicate: DeviceMesh) -> DeviceMesh:
    names = (replicate.mesh_dim_names or ()) + (shard.mesh_dim_names or ())
    root = shard._get_root_mesh()
    if shard.ndim != 1 or replicate.ndim != 1 or len(names) != 2 or replicate._get_root_mesh() is not root:
        raise ValueError(
            "mesh and replicate_mesh must be two named dimensions of one mesh: make it with "
            "init_device_mesh(..., mesh_dim_names=('replicate', 'shard')) and pass mesh['shard'] and mesh['replicate']"
        )
    return root[names]


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        if dist.is_torchelastic_launched():
            dist.init_process_group()
        else:
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    has_cuda = "cuda" in dist.get_backend_config() and torch.cuda.is_available()
    return init_device_mesh("cuda" if has_cuda else "cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
