"""Every option of Muon on owned matrices, with given gradients: one process gives the same, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from dmuon_core import Muon, OwnedTensor, QKClip, QKLayer, dedicate_params
from dmuon_core.optim import update
from tests.distributed.harness import run_distributed
from tests.distributed.reference import full

SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (4, 24), "tall": (24, 4), "square": (8, 8), "row": (1, 16), "column": (16, 1), "one": (1, 1),
    "qkv": (12, 5), "out": (5, 12), "experts": (3, 4, 6), "conv": (6, 2, 3, 3), "bias": (7,),
}  # fmt: skip
SPLIT = {"qkv": (4, 4, 4), "out": "columns:3", "experts": "experts columns:2"}
STEPS = 4
LR = 0.05
TENSORS = {key: torch.tensor([value]) for key, value in (("lr", LR), ("weight_decay", 0.2))}
#: Those with the same group, and how far a result may be off: 0 is bit for bit.
OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "defaults": ({}, 0.0),
    "original": ({"adjust_lr_fn": "original"}, 0.0),
    "match_rms_adamw": ({"adjust_lr_fn": "match_rms_adamw"}, 0.0),
    "none": ({"adjust_lr_fn": "none"}, 0.0),
    "no nesterov": ({"nesterov": False, "momentum": 0.5}, 0.0),
    "maximize": ({"maximize": True}, 0.0),
    "tensors": (TENSORS, 0.0),
    "no steps": ({"ns_steps": 0}, 0.0),
    "eps": ({"eps": 1.0, "ns_dtype": torch.float32}, 0.0),
    "cautious": ({"cautious_weight_decay": True, "weight_decay": 1.0}, 0.0),
    "normuon": ({"normuon": True, "beta2": 0.5}, 0.0),
    "polar express": ({"ns_coefficients": "polar_express", "ns_steps": 3}, 0.0),
    "cans": ({"ns_coefficients": "cans", "ns_dtype": torch.float64}, 0.0),
    "aol": ({"ns_coefficients": "aol", "ns_steps": 4}, 0.0),
    "custom": ({"ns_coefficients": [(2.0, -1.5, 0.5), (1.5, -0.5, 0.0)], "ns_steps": 3}, 0.0),
    "float16": ({"ns_dtype": torch.float16}, 0.0),
    "gram": ({"ns_form": "gram", "ns_dtype": torch.float32}, 0.0),
    "auto": ({"ns_form": "auto", "ns_dtype": torch.float32}, 0.0),
    "qk-clip": ({"qk_clip": 3.0}, 0.0),
    # Other matrices share a batch where there are other owners.
    "batched": ({"batched": True, "ns_dtype": torch.float32}, LR * STEPS * 1e-5),
    "compiled": ({"compile": True, "ns_dtype": torch.float32, "normuon": True}, LR * STEPS * 1e-5),
    "groups": ({"groups": {"slow": {"params": ["wide", "t*"], "lr": 0.01, "momentum": 0.5}}}, 0.0),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=rng)))

    def forward(self, x: Tensor) -> Tensor:
        return x


def gradient(name: str, step: int) -> Tensor:
    """Random, of rank one, zero, huge or tiny, by parameter and step."""
    shape, position = SHAPES[name], list(SHAPES).index(name)
    g = torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + position))
    kind = (position + step) % 5
    if kind == 1 and len(shape) > 1:
        return g.sum(0, keepdim=True).expand(shape).clone()
    return g * {2: 0.0, 3: 1e30, 4: 1e-30}.get(kind, 1.0) if len(shape) > 1 else g


def train(model: Net, optimizer: Muon) -> dict[str, Tensor]:
    """Weights and state after the steps, whole."""
    for step in range(STEPS):
        for name, p in model.named_parameters():
            g = gradient(name, step)
            p.grad = p.at_home(g if p.is_home else g[:0]) if isinstance(p, OwnedTensor) else g
        if optimizer.qk_clip is not None:
            optimizer.qk_clip.record("layer", torch.tensor([1.0 + step, 3.0 * step]))
        optimizer.step()
    found = {}
    for name, p in model.named_parameters():
        found[name] = full(p.detach()).clone()
        found |= {f"{name}/{key}": full(torch.as_tensor(value)).clone() for key, value in optimizer.state[p].items()}
    return found


def build(name: str, mesh: Any = None) -> tuple[Net, Muon]:
    # The eager backend: what is compiled is taken to pieces and put together again, without minutes of a C++ compiler.
    update._compiled = lambda: torch.compile(update.step_window, dynamic=False, backend="eager")
    options = {"lr": LR, **OPTIONS[name][0]}
    if "qk_clip" in options:
        options["qk_clip"] = QKClip({"layer": QKLayer("qkv", "qkv", 2, head_dim=2, key_start=4)}, options["qk_clip"])
    model = Net()
    if mesh is not None:
        dedicate_params(model, mesh, lambda name, p: p.ndim > 1)
        return model, Muon(model, split=SPLIT, **options)
    # Written out by hand, without the model: what is a matrix, and what a group by name holds.
    named = dict(model.named_parameters())
    slow = ["wide", "tall"] if name == "groups" else []
    special = options.pop("groups", {"slow": {}})["slow"]
    groups = [
        {**special, "params": [(name, named[name]) for name in slow]},
        {"params": [(name, p) for name, p in named.items() if name not in slow and p.ndim > 1]},
        {"params": [("bias", named["bias"])], "algorithm": "adamw"},
    ]
    return model, Muon(groups if slow else groups[1:], split=SPLIT, **options)


def _train_all() -> dict[str, dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2,))
    return {name: train(*build(name, mesh)) for name in OPTIONS}


def test_owners_give_what_one_process_gives() -> None:
    outcomes = run_distributed(_train_all, 2)
    start = dict(Net().named_parameters())
    plain: dict[str, Tensor] = {}
    for name, (_, bound) in OPTIONS.items():
        want = train(*build(name))
        plain = plain or want
        for rank, outcome in enumerate(outcomes):
            got = outcome[name]
            assert got.keys() == want.keys(), name
            for key, value in want.items():
                assert torch.isfinite(value).all(), (name, key)
                if bound == 0.0:
                    assert torch.equal(got[key], value), f"{name} on rank {rank}: {key}"
                else:
                    torch.testing.assert_close(got[key], value, rtol=1e-5, atol=bound, msg=f"{name}: {key}")
        if name not in ("defaults", "original", "groups"):
            assert any(not torch.equal(want[key], plain[key]) for key in SHAPES if key != "bias"), f"{name} did nothing"
        assert all(not torch.equal(want[key], start[key]) for key in SHAPES)
    moved = {key for key in SHAPES if not torch.equal(outcomes[0]["groups"][key], plain[key])}
    assert moved == {"wide", "tall"}
    assert all(torch.equal(outcomes[0]["original"][key], value) for key, value in plain.items())
