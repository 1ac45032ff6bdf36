"""Fits of a LightningModule on the ranks of a job, and the same fit by a stock Trainer in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from dmuon_core import Muon, OwnedTensor
from dmuon_core.registry import find_dedicated
from dmuon_lightning import DMuonStrategy
from tests.distributed.reference import full, full_grads, full_weights, newton_schulz_float32
from tests.lightning import modules

MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True}
ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}

# ------------------------------------------------------------------------------------- the optimizers of the comparison


def muon(model: nn.Module, **options: Any) -> Muon:
    """What a user of this library writes; Newton-Schulz in float32, so that rounding stays rounding."""
    adamw = {f"adamw_{name}": value for name, value in ADAMW.items()}
    return Muon(model, **{**MUON, **adamw, "ns_dtype": torch.float32, **options})


def one_process_muon(model: nn.Module, layers: tuple[str, ...] = ("blocks", "mix")) -> torch.optim.Optimizer:
    """The same without this library."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    is_matrix = {name: name.startswith(layers) and p.ndim == 2 for name, p in named}
    return Joint(
        Float32Muon([p for name, p in named if is_matrix[name]], **MUON),
        torch.optim.AdamW([p for name, p in named if not is_matrix[name]], **ADAMW),
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAMW)


class Float32Muon(torch.optim.Optimizer):
    """Muon from its formula, with Newton-Schulz in float32."""

    def __init__(self, params: Any, lr: float, weight_decay: float, momentum: float, nesterov: bool) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        assert nesterov

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta = group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                average.mul_(beta).add_(p.grad, alpha=1 - beta)
                update = newton_schulz_float32(p.grad.float() * (1 - beta) + average.float() * beta)
                scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"] * scale)


class Joint(torch.optim.Optimizer):
    """Two optimizers behind one face, because a Trainer steps only one by itself."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([dict(group) for part in parts for group in part.param_groups], {})
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def step_decay(make: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """A schedule of both groups, by the step, in the form that Lightning documents."""

    def configure(model: nn.Module) -> Any:
        optimizer = make(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return configure


def two_optimizers(make: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """For manual optimization: one for the matrices, a stock AdamW for the rest."""

    def configure(model: nn.Module) -> Any:
        if make is one_process_muon:
            return list(make(model).parts)
        owned = [(name, p) for name, p in model.named_parameters() if isinstance(p, OwnedTensor)]
        rest = [p for p in model.parameters() if not isinstance(p, OwnedTensor)]
        return [Muon(owned, **MUON, ns_dtype=torch.float32), torch.optim.AdamW(rest, **ADAMW)]

    return configure


def also_turn(make: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """Muon for a matrix that sits on the LightningModule, too."""
    return partial(one_process_muon, layers=("blocks", "mix", "turn")) if make is one_process_muon else make


def matrices_and_turn(name: str, p: nn.Parameter) -> bool:
    return name.startswith(("blocks", "mix", "turn")) and p.ndim == 2


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "": lambda make: make,
    "adamw": lambda make: adamw,
    "also_turn": also_turn,
    "step_decay": step_decay,
    "two_optimizers": two_optimizers,
}

# -------------------------------------------------------------------------------------------------------------- one fit


@dataclass(frozen=True)
class Fit:
    """A fit by names, so that it can be sent to a rank."""

    module: str = "Net"
    optimizers: str = ""  # key of WRAPPERS
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    epochs: int = 2
    validate: bool = False
    hands: int = 1  # the reference plays so many ranks in turn, and accumulates their gradients


@dataclass
class Fitted:
    losses: list[float]  # mean over the ranks
    grads: dict[str, Tensor]  # as the last step saw them
    weights: dict[str, Tensor]
    state: dict[str, Tensor]  # of the optimizers
    metrics: dict[str, float]
    stats: dict[str, int]


def make_trainer(strategy: Any, **options: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(accelerator="cpu", devices=world_size(), strategy=strategy, **{**quiet, **options})


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def make_module(recipe: Fit, stock: bool = False) -> Any:
    make = WRAPPERS[recipe.optimizers](one_process_muon if stock else muon)
    return getattr(modules, recipe.module)(make, seed=rank())  # rank 0's weights win


def fit(recipe: Fit, ckpt_path: str | None = None, callbacks: Sequence[pl.Callback] = ()) -> Fitted:
    """Inside a rank: DMuonStrategy."""
    module = make_module(recipe)
    strategy = DMuonStrategy(**recipe.strategy)
    trainer = make_trainer(strategy, max_epochs=recipe.epochs, callbacks=list(callbacks), **recipe.trainer)
    trainer.fit(module, modules.loader(), modules.loader() if recipe.validate else None, ckpt_path=ckpt_path)
    return result_of(trainer, module)


def fit_in_one_process(recipe: Fit) -> Fitted:
    """Inside a single rank: the stock Trainer, strategy and optimizers."""
    module = make_module(recipe, stock=True)
    windows = recipe.hands * recipe.trainer.get("accumulate_grad_batches", 1)
    options = {**recipe.trainer, "accumulate_grad_batches": windows}
    trainer = make_trainer("auto", max_epochs=recipe.epochs, **options)
    validation = modules.loader() if recipe.validate else None
    trainer.fit(module, modules.loader(hands=recipe.hands), validation)
    result = result_of(trainer, module)
    result.losses = torch.tensor(result.losses).view(-1, recipe.hands).mean(1).tolist()
    return result


def result_of(trainer: pl.Trainer, module: Any) -> Fitted:
    """Collective."""
    dedicated = find_dedicated(module)
    counts = dict(vars(dedicated.stats)) if dedicated is not None else {}
    grads = {name: grad for name, grad in full_grads(module).items() if grad is not None}
    return Fitted(mean_losses(module), grads, full_weights(module), state_of(trainer, module), metrics(trainer), counts)


def mean_losses(module: Any) -> list[float]:
    losses = torch.tensor(module.losses, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(losses)
    return (losses / world_size()).tolist()


def metrics(trainer: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def state_of(trainer: pl.Trainer, module: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the optimizers' state, whole, by ``parameter/key``. Collective."""
    optimizers = [part for o in trainer.optimizers for part in getattr(o, "parts", [o])]
    found = {}
    for name, p in module.named_parameters():  # an order that is the same on every rank
        for optimizer in optimizers:
            if p in optimizer.state:
                for key, value in sorted(optimizer.state[p].items()):
                    found[f"{name}/{key}"] = full(torch.as_tensor(value))
    return found


# ----------------------------------------------------------------------------------------------------------- comparison


# Only the order of summation differs. Measured: below 6e-7 (losses), 1e-7 (gradients), 5e-7 (weights); a contribution
# that a rank loses is off by 1e-2.
LOSS_ATOL = 1e-6
GRAD_ATOL = 1e-6
WEIGHT_ATOL = 1e-5


def assert_close(
    got: Fitted, want: Fitted, losses: float = LOSS_ATOL, grads: float = GRAD_ATOL, weights: float = WEIGHT_ATOL
) -> None:
    assert len(got.losses) == len(want.losses) > 0
    torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(want.losses), rtol=0, atol=losses)
    assert_tensors_close(got.grads, want.grads, grads)
    assert_tensors_close(got.weights, want.weights, weights)


def assert_tensors_close(got: dict[str, Tensor], want: dict[str, Tensor], atol: float) -> None:
    assert got.keys() == want.keys()
    off = {name: difference for name, difference in differences(got, want) if not difference <= atol}
    assert not off, f"allowed is {atol:.0e}, there is {off}"


def differences(got: dict[str, Tensor], want: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    for name, tensor in got.items():
        yield name, (tensor.double() - want[name].double()).abs().max().item()


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in got if not torch.equal(got[name], want[name])] == []
