"""Property: whatever the model and the two layouts, a checkpoint of one, loaded in the other, is every tensor of it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.distributed.checkpoints import LAYOUTS, Layout, Run, assert_same, check_at_home
from tests.distributed.harness import run_distributed

VOCABULARY = 7


@dataclass(frozen=True)
class Spec:
    width: int
    blocks: tuple[str, ...]
    bias: bool
    tie_head: bool
    tie_blocks: bool  # the first matrices of blocks of one kind
    frozen: frozenset[int]  # positions among the parameters, not of the first block


class Part(nn.Module):
    def __init__(self, kind: str, width: int, bias: bool) -> None:
        super().__init__()
        self.kind = kind
        if kind == "vectors":
            self.gain, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        elif kind == "conv":
            self.first = nn.Conv1d(width, width, 3, padding=1, bias=bias)
        else:
            inner = {"narrow": 2, "wide": width + 3, "huge": 50 * width}[kind]
            self.first, self.second = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "vectors":
            return x * self.gain + self.bias
        if self.kind == "conv":
            return x + self.first(x.transpose(1, 2)).transpose(1, 2)
        return x + self.second(F.gelu(self.first(x)))


class Model(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, spec.width)
        self.blocks = nn.ModuleList(Part(kind, spec.width, spec.bias) for kind in spec.blocks)
        self.head = nn.Linear(spec.width, VOCABULARY, bias=False)
        self.register_buffer("statistics", torch.rand(3))
        if spec.tie_head:
            self.head.weight = self.embed.weight
        alike = [block for block in self.blocks if block.kind == spec.blocks[0]]
        if spec.tie_blocks:
            for block in alike:
                block.first.weight = alike[0].first.weight
        for index, p in enumerate(self.parameters()):
            p.requires_grad_(p is self.blocks[0].first.weight or index not in spec.frozen)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


KINDS = ["narrow", "wide", "huge", "conv", "vectors"]
SPECS = st.builds(
    Spec,
    width=st.integers(2, 5),
    blocks=st.builds(
        lambda first, rest: (first, *rest), st.sampled_from(KINDS[:-1]), st.lists(st.sampled_from(KINDS), max_size=3)
    ),
    bias=st.booleans(),
    tie_head=st.booleans(),
    tie_blocks=st.booleans(),
    frozen=st.frozensets(st.integers(0, 8), max_size=4),
)


def _build(spec: Spec, layout: Layout, seed: int) -> Run:
    return Run(layout, partial(Model, spec), seed)


def _save(layout: Layout, specs: list[Spec], folder: str) -> None:
    for index, spec in enumerate(specs):
        run = _build(spec, layout, seed=0)
        for step in range(2):
            tokens = torch.randint(0, VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(step))
            F.cross_entropy(run.model(tokens).flatten(0, 1), tokens.flatten()).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        run.save_folder(f"{folder}/{index}.folder")
        run.save_file(f"{folder}/{index}.file")
        tensors = run.tensors()
        assert run.handle.params and any(value.any() for name, value in tensors.items() if "momentum" in name)
        if dist.get_rank() == 0:
            torch.save(tensors, f"{folder}/{index}.expected")


def _load(layout: Layout, specs: list[Spec], folder: str) -> None:
    for index, spec in enumerate(specs):
        for how in ("folder", "file"):
            run = _build(spec, layout, seed=1)
            run.load(how, f"{folder}/{index}.{how}")
            assert_same(run.tensors(), torch.load(f"{folder}/{index}.expected"))
            check_at_home(run)


def _check(specs: list[Spec], source: Layout, target: Layout) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_distributed(_save, source.world, source, specs, folder)
        run_distributed(_load, target.world, target, specs, folder)


FEW = [
    Spec(5, ("huge", "wide", "vectors"), bias=True, tie_head=True, tie_blocks=False, frozen=frozenset({2, 5})),
    Spec(3, ("conv", "conv"), bias=False, tie_head=False, tie_blocks=True, frozen=frozenset()),
    Spec(2, ("narrow",), bias=True, tie_head=False, tie_blocks=False, frozen=frozenset({0})),
]


def test_a_few_models() -> None:
    _check(FEW, Layout(2, 2), Layout(2, 1))


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # without shrinking, which would take minutes
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(SPECS, min_size=4, max_size=4), st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS))
def test_many_models(specs: list[Spec], source: Layout, target: Layout) -> None:
    _check(specs, source, target)
