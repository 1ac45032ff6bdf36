"""Training in some layout, and saving and loading it by torch's own tools, as a user would write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import dmuon_core
from tests.distributed.models import MODELS
from tests.distributed.reference import Rows, dedicate, full_state, full_weights, make_muon, mean_over_ranks

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@dataclass(frozen=True)
class Layout:
    """``shards`` ranks share the model, and ``replicas`` such groups hold it."""

    shards: int
    replicas: int = 1

    @property
    def world(self) -> int:
        return self.shards * self.replicas

    def __str__(self) -> str:
        return f"{self.shards}x{self.replicas}"


LAYOUTS = [Layout(1, 1), Layout(2, 1), Layout(4, 1), Layout(2, 2), Layout(1, 4)]


class Run:
    """A model and its optimizer on the ranks of this job, with other weights for every seed."""

    def __init__(
        self,
        layout: Layout | None = None,
        model: str | Callable[[], nn.Module] = "gpt",
        seed: int = 0,
        zero3: bool = True,
        **options: Any,
    ) -> None:
        layout = layout or Layout(dist.get_world_size())
        assert layout.world == dist.get_world_size()
        torch.manual_seed(seed)
        self.name = model if isinstance(model, str) else "gpt"
        self.model = MODELS[model]() if isinstance(model, str) else model()
        replicas = layout.replicas if layout.replicas > 1 else 0
        self.handle = dedicate(self.model, zero3=zero3, replicas=replicas, **options)
        self.optimizer = make_muon(self.model)

    def backward(self, step: int, micro: int = 0, scale: float = 1.0) -> float:
        """Forward and backward of this rank's rows; the mean loss of all ranks. Collective."""
        loss = Rows(self.name, step, micro, dist.get_rank(), dist.get_world_size()).loss(self.model)
        (loss * scale).backward()
        return mean_over_ranks(loss.item())

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            losses.append(self.backward(step))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def tensors(self) -> dict[str, Tensor]:
        """Weights, buffers and optimizer state, whole, by name. Collective."""
        buffers = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        return {**full_weights(self.model), **buffers, **full_state(self.model, self.optimizer)}

    # What a user writes

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def save_folder(self, path: str | Path) -> None:
        dcp.save(self.state(), checkpoint_id=path)

    def load_folder(self, path: str | Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])

    def save_file(self, path: str | Path) -> None:
        weights = get_model_state_dict(self.model, options=WHOLE)
        moments = get_optimizer_state_dict(self.model, self.optimizer, options=WHOLE)
        if dist.get_rank() == 0:
            torch.save({"model": weights, "optimizer": moments}, path)
        dist.barrier()

    def load_file(self, path: str | Path) -> None:
        state = torch.load(path, mmap=True) if dist.get_rank() == 0 else {"model": {}, "optimizer": {}}
        set_model_state_dict(self.model, state["model"], options=FROM_RANK_0)
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=FROM_RANK_0)

    def save(self, how: str, path: str | Path) -> None:
        self.save_folder(path) if how == "folder" else self.save_file(path)

    def load(self, how: str, path: str | Path) -> None:
        self.load_folder(path) if how == "folder" else self.load_file(path)


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Same names, and every tensor equal bit by bit, in the same dtype."""
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    other = [name for name in want if got[name].dtype != want[name].dtype or not torch.equal(got[name], want[name])]
    assert not other, f"{len(other)} of {len(want)} differ: {other[:5]}"


def check_at_home(run: Run) -> None:
    """Owned state has rows on the owner alone, whatever layout it came from."""
    for param in run.handle.params:
        for value in run.optimizer.state[param.rest].values():
            assert isinstance(value, dmuon_core.OwnedTensor)
            assert value._local_tensor.shape[0] == (param.shape[0] if param.is_owner else 0), param.fqn
    dmuon_core.check_invariants(run.model)
