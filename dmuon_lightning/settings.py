"""The arguments that the strategies for the Trainer and for Fabric share, in the forms that a config file can give."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from dmuon_lightning._lightning import MisconfigurationException

Targets = Callable[[str, nn.Parameter], bool] | list[str]
"""Which parameters are Muon targets: a predicate over (FQN, parameter), or shell-style patterns of FQNs."""

Splits = dict[str, int | str | list[int]]
"""Which matrices a parameter stands for, by shell-style patterns of FQNs; see :class:`dmuon_core.Muon`."""

ModulePolicy = set[type[nn.Module]] | Callable[..., bool]
"""Modules, by their classes or by a policy of FSDP's form, ``(module, recurse, nonwrapped_numel) -> bool``."""


@dataclass(frozen=True)
class Settings:
    """What to do to a module. See :class:`dmuon_lightning.DMuonStrategy` for the meaning of each.

    Raises:
        ValueError: at construction, for arguments that contradict one another.
    """

    predicate: Targets | None = None
    hook_boundary_predicate: Callable[[nn.Module], bool] | None = None
    auto_wrap_policy: ModulePolicy | None = None
    activation_checkpointing_policy: ModulePolicy | None = None
    reshard_after_forward: bool = True
    replicate_size: int = 1
    replicate_async: bool = True
    mp_policy: MixedPrecisionPolicy | None = None
    master_dtype: torch.dtype | None = torch.float32
    split: Splits | None = None
    max_owned_bytes: int | None = None
    flops: Callable[[tuple[int, int]], int] | None = None

    def __post_init__(self) -> None:
        if self.replicate_size < 1:
            raise ValueError(f"DMuonStrategy(replicate_size={self.replicate_size}): pass 1 or more")
        if isinstance(self.predicate, str):
            raise ValueError(f"DMuonStrategy(predicate={self.predicate!r}): pass a list of patterns, or a function")
        if self.hook_boundary_predicate is not None and self.auto_wrap_policy is not None:
            raise ValueError(
                "DMuonStrategy(hook_boundary_predicate=..., auto_wrap_policy=...): both choose the modules that are "
                "unsharded as a unit, pass one of them"
            )

    def make_mesh(self, device: torch.device, world_size: int) -> DeviceMesh:
        """A mesh in which "data_parallel" is every process. Collective.

        Raises:
            MisconfigurationException: the number of processes is no multiple of ``replicate_size``.
        """
        replicas = self.replicate_size
        if replicas == 1:
            return init_device_mesh(device.type, (world_size,), mesh_dim_names=("data_parallel",))
        if world_size % replicas:
            raise MisconfigurationException(
                f"DMuonStrategy(replicate_size={replicas}) does not divide the number of processes, {world_size}: "
                "choose a divisor, such as the number of nodes, or another Trainer(devices=..., num_nodes=...)"
            )
        shape = (replicas, world_size // replicas)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        mesh._flatten("data_parallel")
        return mesh

    def targets_in(self, module: nn.Module) -> Callable[[str, nn.Parameter], bool] | None:
        """The predicate for the parameters of ``module``; None for the default. Local.

        Raises:
            MisconfigurationException: a pattern matches no matrix of ``module``.
        """
        if self.predicate is None or callable(self.predicate):
            return self.predicate
        patterns = list(self.predicate)
        matrices = [name for name, p in module.named_parameters() if p.ndim >= 2]
        for pattern in patterns:
            if not fnmatch.filter(matrices, pattern):
                raise MisconfigurationException(
                    f"DMuonStrategy(predicate=[{pattern!r}]): no matrix of {type(module).__name__} has such a name; "
                    f"the first ones are {', '.join(map(repr, matrices[:5]))}"
                )
        return partial(_matches, patterns)

    def boundary(self) -> Callable[[nn.Module], bool] | None:
        """Which modules are unsharded as a unit; None for the default. Local."""
        if self.auto_wrap_policy is not None:
            return partial(policy_picks, self.auto_wrap_policy)
        return self.hook_boundary_predicate


def policy_picks(policy: ModulePolicy, module: nn.Module) -> bool:
    """Whether ``policy`` chooses ``module``. Local."""
    if not callable(policy):
        return isinstance(module, tuple(policy))
    return bool(policy(module=module, recurse=False, nonwrapped_numel=sum(p.numel() for p in module.parameters())))


def checkpoint_activations(root: nn.Module, policy: ModulePolicy) -> None:
    """Let the modules that ``policy`` chooses recompute their activations in backward. Local, in place.

    Inside of the modules' hooks, so that weights are brought once for recompute and backward together, and without a
    wrapper, so that parameters keep their names.

    Raises:
        MisconfigurationException: the policy chooses no module.
    """
    chosen = [module for module in root.modules() if module is not root and policy_picks(policy, module)]
    if not chosen:
        raise MisconfigurationException(
            f"DMuonStrategy(activation_checkpointing_policy={policy!r}) chooses no module of {type(root).__name__}"
        )
    for module in chosen:
        module.forward = _checkpointed(module.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:  # a function with a frame, which a compiler can enter
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed


def _matches(patterns: list[str], name: str, param: nn.Parameter) -> bool:
    return param.ndim >= 2 and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
