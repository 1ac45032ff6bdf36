"""Loading optimizer state that others may have written: stock optimizers, plain models, other owners."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from dmuon_core.optim.groups import GROUP_DEFAULTS, group_label, param_label
from dmuon_core.optim.local import zeros_for_state
from dmuon_core.optim.update import state_shapes
from dmuon_core.owned_tensor import OwnedTensor, own_like


def adopt_groups(saved: list[dict[str, Any]], current: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved groups, with what stock ``torch.optim.Muon`` and ``AdamW`` do not save from ours.

    Raises:
        ValueError: a saved group is of another algorithm, or of an AdamW variant that Muon does not have.
    """
    adopted = []
    for index, (theirs, ours) in enumerate(zip(saved, current, strict=True)):
        algorithm = theirs.get("algorithm") or ("adamw" if "betas" in theirs else "muon")
        if algorithm != ours["algorithm"]:
            raise ValueError(
                f"Muon: {group_label(index)} uses {ours['algorithm']!r}, but the loaded state was saved by "
                f"a group that uses {algorithm!r}; build the optimizer with the same groups, in the same "
                "order, as when the state was saved"
            )
        if theirs.get("amsgrad"):
            raise ValueError(
                f"Muon: the state loaded into {group_label(index)} was saved with amsgrad=True, which "
                "Muon does not support; start this group without saved state"
            )
        own_keys = ("algorithm", "name", *GROUP_DEFAULTS[algorithm])
        kept = {key: ours[key] for key in ("split",) if key in ours}  # of the model, not of the training
        adopted.append({**{key: ours[key] for key in own_keys if key in ours}, **theirs, **kept})
    return adopted


def check_loaded_state(groups: list[dict[str, Any]], state: Any) -> None:
    """Check the shapes of loaded state against the parameters. Local; writes nothing.

    Raises:
        ValueError: a loaded tensor does not have its parameter's shape; the message names the parameter.
    """
    for index, group in enumerate(groups):
        for position, p in enumerate(group["params"]):
            for key, value in _tensors(state, p):
                expected = tuple(state_shapes(group, position).get(key, p.shape))
                if tuple(value.shape) != expected:
                    name = param_label(group, position, group_label(index))
                    raise ValueError(
                        f"Muon: the loaded {key!r} of {name} has shape {tuple(value.shape)}, the parameter "
                        f"needs {expected}; was the state saved from the same model, in the same order?"
                    )


def place_state(groups: list[dict[str, Any]], state: Any) -> None:
    """Give every state tensor the placement of its parameter.

    Each rank takes its part of a plain full tensor without communication; a DTensor placed in another way is
    redistributed, which is a collective: the order is that of the groups, so all ranks must load the same
    state.
    """
    for p in chain.from_iterable(group["params"] for group in groups):
        for key, value in _tensors(state, p):
            state[p][key] = placed_like(value, p)


def placed_like(value: Tensor, p: Tensor) -> Tensor:
    """``value`` as state of ``p``: whole where ``p`` is plain, else with its placement. See :func:`place_state`."""
    if isinstance(p, OwnedTensor):
        like = zeros_for_state(p, value.shape)
        assert isinstance(like, OwnedTensor)
        return own_like(value, like)
    if isinstance(p, DTensor):
        if not isinstance(value, DTensor):
            return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
        same = value.placements == p.placements and value.device_mesh == p.device_mesh
        return value if same and not isinstance(value, OwnedTensor) else value.redistribute(p.device_mesh, p.placements)
    return value.full_tensor() if isinstance(value, DTensor) else value


def _tensors(state: Any, p: Tensor) -> list[tuple[str, Tensor]]:
    return [(k, v) for k, v in state.get(p, {}).items() if k != "step" and isinstance(v, Tensor)]
