"""What `benchmarks.compare` runs side by side: the same model under different optimizers and systems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from benchmarks.step_time import GatheringMuon
from dmuon_core import Muon, dedicate_params, default_boundaries
from dmuon_core.targets import muon_targets
from examples.gpt import GPT, GPTConfig


@dataclass
class Contender:
    """A model that is ready to train, and what steps it."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]

    def forward_backward(self, tokens: Tensor) -> None:
        logits = self.model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _sharded(config: GPTConfig, mesh: DeviceMesh) -> tuple[GPT, list[nn.Parameter], list[nn.Parameter]]:
    """A model under FSDP2, its hidden matrices and its other parameters, all sharded."""
    model = GPT(config).to(mesh.device_type)
    names = set(muon_targets(model))
    _shard(model, mesh, True)
    named = list(model.named_parameters())
    return model, [p for name, p in named if name in names], [p for name, p in named if name not in names]


def _shard(model: nn.Module, mesh: DeviceMesh, reshard_after_forward: bool) -> None:
    for block in default_boundaries(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)


def fsdp2_adamw(config: GPTConfig, mesh: DeviceMesh) -> Contender:
    model, hidden, rest = _sharded(config, mesh)
    return Contender(model, [torch.optim.AdamW([*hidden, *rest], lr=1e-3, fused=True)])


def fsdp2_gathered_muon(config: GPTConfig, mesh: DeviceMesh) -> Contender:
    """The redundant way: every rank gathers every gradient and computes all of the update."""
    model, hidden, rest = _sharded(config, mesh)
    return Contender(model, [GatheringMuon(hidden, lr=0.01), torch.optim.AdamW(rest, lr=1e-3, fused=True)])


def fsdp2_stock_muon(config: GPTConfig, mesh: DeviceMesh) -> Contender:
    """DTensor divides the products among the ranks and gathers what each of them needs."""
    model, hidden, rest = _sharded(config, mesh)
    return Contender(model, [torch.optim.Muon(hidden, lr=0.01), torch.optim.AdamW(rest, lr=1e-3, fused=True)])


def muon_fsdp2(config: GPTConfig, mesh: DeviceMesh) -> Contender:
    """https://pypi.org/project/muon-fsdp2: gathers each gradient on one rank in turn and scatters its update."""
    import muon_fsdp2 as package

    model, hidden, rest = _sharded(config, mesh)
    groups = [
        {"params": hidden, "lr": 0.01, "use_muon": True, "rms_scale": False, "weight_decay": 0.1},
        {"params": rest, "lr": 1e-3, "use_muon": False, "weight_decay": 0.01},
    ]
    return Contender(model, [package.Muon(groups)])


def _dmuon(zero3: bool, **options: object) -> Callable[[GPTConfig, DeviceMesh], Contender]:
    def build(config: GPTConfig, mesh: DeviceMesh) -> Contender:
        model = GPT(config).to(mesh.device_type)
        dedicate_params(model, mesh, reshard_after_forward=zero3)
        _shard(model, mesh, zero3)
        return Contender(model, [Muon(model, lr=0.01, adamw_lr=1e-3, **options)])  # type: ignore[arg-type]

    return build


BASELINE, REDUNDANT = "FSDP2 + AdamW", "FSDP2 + Muon, gathered"
Z3, Z2 = "this library, Z3", "this library, Z2"


def contenders() -> dict[str, Callable[[GPTConfig, DeviceMesh], Contender]]:
    """Builders by name; other packages only where they are installed."""
    found = {
        BASELINE: fsdp2_adamw,
        REDUNDANT: fsdp2_gathered_muon,
        "FSDP2 + torch.optim.Muon": fsdp2_stock_muon,
        Z3: _dmuon(True),
        Z2: _dmuon(False),
        f"{Z3}, batched": _dmuon(True, batched=True),
    }
    if find_spec("muon_fsdp2"):
        found["muon-fsdp2"] = muon_fsdp2
    return found
