"""describe(): what a user sees of a plain model before anything is done to it."""

from __future__ import annotations

import pytest
import torch
from model_trees import GPT
from torch import nn

from dmuon_core import describe
from dmuon_core.partition import MatrixSpec, compute_balanced_assignment

EXPECTED = """\
GPT on 2 shard ranks: 8 matrices owned (1.0 KiB), 17 parameters left to FSDP2 (736 B)

layers.0: Block, 4 matrices, 512 B, at most {8} from one rank
    attn.qkv.weight            12 x 4       192 B  rank {0}
    attn.out.weight             4 x 4        64 B  rank {1}
    mlp.up.weight               8 x 4       128 B  rank {2}
    mlp.down.weight             4 x 8       128 B  rank {3}
layers.1: Block, 4 matrices, 512 B, at most {9} from one rank
    attn.qkv.weight            12 x 4       192 B  rank {4}
    attn.out.weight             4 x 4        64 B  rank {5}
    mlp.up.weight               8 x 4       128 B  rank {6}
    mlp.down.weight             4 x 8       128 B  rank {7}
"""


def names(layer: int) -> list[str]:
    return [f"layers.{layer}.{name}.weight" for name in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")]


def test_plain_model_on_meta() -> None:
    with torch.device("meta"):
        model = GPT()
    params = dict(model.named_parameters())
    specs = [MatrixSpec(name, tuple(params[name].shape), f"layers.{i}") for i in range(2) for name in names(i)]
    assignment = compute_balanced_assignment(specs, 2)
    text = describe(model, 2)
    owners = [assignment.owners[name] for i in range(2) for name in names(i)]
    roots = [f"{assignment.root_bytes[f'layers.{i}']} B" for i in range(2)]
    assert text == EXPECTED.format(*owners, *roots) + "\n" + str(assignment)
    assert "rank 0" in text and "rank 1" in text


def test_replicas_dtypes_predicates() -> None:
    model = GPT().bfloat16()
    text = describe(
        model, 2, 3, lambda name, param: name.endswith("up.weight"),
        hook_boundary_predicate=lambda module: isinstance(module, GPT), master_dtype=None,
    )  # fmt: skip
    lines = text.splitlines()
    assert lines[0].startswith("GPT on 2 shard ranks x 3 replicas: 2 matrices owned (128 B), 23 parameters left")
    assert lines[2] == "(root): GPT, 2 matrices, 128 B, at most 64 B from one rank"
    assert lines[3] == "    layers.0.mlp.up.weight             8 x 4        64 B  replica 0, shard rank 0"
    assert lines[4] == "    layers.1.mlp.up.weight             8 x 4        64 B  replica 1, shard rank 1"


def test_costs_are_those_of_the_parts() -> None:
    model = GPT()
    split = {"*.qkv.weight": 3}
    params = dict(model.named_parameters())
    specs = [
        MatrixSpec(name, tuple(params[name].shape), f"layers.{i}", ((4, 4),) * 3 if "qkv" in name else None)
        for i in range(2)
        for name in names(i)
    ]
    assert describe(model, 2, split=split).endswith(str(compute_balanced_assignment(specs, 2)))
    with pytest.raises(ValueError, match="fits"):
        describe(model, 2, split={"*.missing": 3})
    experts = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    experts[0].weight = nn.Parameter(torch.zeros(5, 4, 6))
    text = describe(experts, 1, predicate=lambda name, param: name == "0.weight")
    assert str(compute_balanced_assignment([MatrixSpec("0.weight", (5, 4, 6), "", ((4, 6),) * 5)], 1)) in text


def test_long_lists_are_cut() -> None:
    wide = nn.Sequential(nn.Embedding(4, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(21))))
    lines = describe(wide, hook_boundary_predicate=lambda module: module is wide).splitlines()
    assert lines[2].startswith("(root): Sequential, 20 matrices")
    assert lines[2 + 1 + 15] == "    ... and 5 more"


def test_errors_are_those_of_dedication() -> None:
    with pytest.raises(ValueError, match="has no hidden-layer matrix to dedicate"):
        describe(nn.Embedding(4, 4))
    with pytest.raises(ValueError, match=r"alone has \d+ bytes, max_owned_bytes is 10"):
        describe(GPT(), 2, max_owned_bytes=10)
