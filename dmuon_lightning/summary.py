"""One line on who owns how much, for the log."""

from __future__ import annotations

from dmuon_core import DedicatedModel


def describe(dedicated: DedicatedModel) -> str:
    """One line on who owns how much. Local."""
    mesh = dedicated.mesh
    owned: dict[tuple[int, ...], int] = {}
    for param in dedicated.params:
        size = param.numel * param.rest.element_size()
        owned[param.owned.home] = owned.get(param.owned.home, 0) + size
    least = min(owned.values()) if len(owned) == mesh.size() else 0
    sizes = " x ".join(map(str, mesh.shape))
    names = " x ".join(mesh.mesh_dim_names or ()) or "processes"
    return (
        f"DMuon: {len(dedicated.params)} matrices ({_megabytes(sum(owned.values()))}) owned over {mesh.size()} ranks "
        f"(mesh {sizes}, {names}), {_megabytes(least)} to {_megabytes(max(owned.values()))} on a rank; busiest owner "
        f"at {dedicated.assignment.ratio:.3f} of the ideal"
    )


def _megabytes(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"
