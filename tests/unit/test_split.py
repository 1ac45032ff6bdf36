"""Which matrices a parameter stands for, for specs, rules and whole models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dmuon_core.optim import Muon
from dmuon_core.optim.split import matrix_parts, model_splits, parse_split, resolve_split

PARTS = [
    (None, (4, 6), [(4, 6)]),
    ("whole", (3, 4, 6), [(3, 24)]),
    (None, (8, 3, 3, 3), [(8, 27)]),
    ("rows:2", (4, 6), [(2, 6), (2, 6)]),
    ("rows:3,1", (4, 6), [(3, 6), (1, 6)]),
    ("rows:2", (4, 3, 2), [(2, 6), (2, 6)]),
    ("columns:3", (4, 6), [(4, 2)] * 3),
    ("columns:1,5", (4, 6), [(4, 1), (4, 5)]),
    ("experts", (3, 4, 6), [(4, 6)] * 3),
    ("experts whole", (3, 4, 6), [(4, 6)] * 3),
    ("experts rows:3,1", (2, 4, 6), [(3, 6), (1, 6)] * 2),
    ("experts columns:2", (2, 4, 6), [(4, 3)] * 4),
    ("experts", (2, 4, 3, 2), [(4, 6)] * 2),
]


@pytest.mark.parametrize(("spec", "shape", "parts"), PARTS)
def test_parts_and_pieces(spec, shape, parts):
    split = parse_split(spec, shape)
    assert split.parts == tuple(parts)
    t = torch.arange(torch.Size(shape).numel()).view(shape)
    matrices = [
        m for piece in split.pieces(t) for m in split.matrices(piece).reshape(-1, *split.matrices(piece).shape[-2:])
    ]
    assert sorted(tuple(m.shape) for m in matrices) == sorted(parts)
    assert sorted(torch.cat([m.flatten() for m in matrices]).tolist()) == t.flatten().tolist()
    rows = torch.zeros(split.row_shape)
    assert rows.ndim == t.ndim and rows.numel() == sum(m for m, _ in parts)
    for piece, values in zip(split.pieces(t), split.row_values(rows), strict=True):
        matrix = split.matrices(piece)
        assert values.numel() == matrix[..., 0].numel()
        # A value for each row stands in the same place as the row: broadcast against the piece it reaches its row only.
        values.copy_(matrix[..., 0].reshape(values.shape))
        assert torch.equal(values.reshape(*matrix.shape[:-1], 1).squeeze(-1), matrix[..., 0].float())


@pytest.mark.parametrize(
    ("spec", "shape", "why"),
    [
        ("rows:3", (4, 6), "3 does not divide its 4 rows"),
        ("rows:3,2", (4, 6), "the sizes add up to 5, not to its 4 rows"),
        ("columns:4", (4, 6), "4 does not divide its 6 columns"),
        ("columns:2", (4, 6, 2), "a convolution has no columns to cut"),
        ("experts", (4, 6), "stacked experts need three dimensions"),
        *((spec, (4, 6), "it cannot be read") for spec in ("row:2", "rows", "rows:", "rows:0", "rows:-1", "x")),
        *((spec, (4, 6), "it cannot be read") for spec in ("rows:1.5", "rows:2 columns:2")),
        *((spec, (4, 6), "it is empty") for spec in ("", " ")),
    ],
)
def test_unfit_specs_are_named(spec, shape, why):
    with pytest.raises(ValueError, match=f"split '{spec}' of 'blocks.0.qkv.weight' with shape .*: {why}.*; specs are"):
        resolve_split({"*.qkv.weight": spec}, "blocks.0.qkv.weight", torch.zeros(shape))


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), columns=st.integers(1, 5))
def test_rows_of_any_sizes(sizes, columns):
    p = torch.zeros(sum(sizes), columns)
    spec = resolve_split(sizes, "w", p)
    if len(sizes) == 1 and sizes[0] > 1:
        assert spec == f"rows:{sizes[0]}"  # a single number is a count
        return
    assert parse_split(spec, tuple(p.shape)).parts == tuple((size, columns) for size in sizes)


def test_rules():
    p = torch.zeros(6, 4)
    assert resolve_split(None, "w", p) is None
    assert resolve_split(3, "w", p) == "rows:3"
    assert resolve_split([2, 2, 2], "w", p) == "rows:2,2,2"
    assert resolve_split({"*.q": 3, "*": "whole"}, "a.q", p) == "rows:3"
    assert resolve_split({"*.q": 3, "*": "whole"}, "a.k", p) == "whole"
    assert resolve_split({"*.q": 3}, "a.k", p) is None
    assert resolve_split(lambda name, parameter: parameter.shape[1] // 2 if name == "w" else None, "w", p) == "rows:2"
    assert resolve_split(lambda name, parameter: None, "w", p) is None


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 4, 8))
        self.down = nn.Parameter(torch.randn(3, 8, 4))
        self.router = nn.Linear(4, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.conv, self.experts = nn.Linear(4, 12), nn.Conv1d(4, 4, 3), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 7)


@pytest.mark.parametrize("rule", [2.0, True, (), [1.5, 2.5], ["a"], "", {"w": 2.0}])
def test_rules_that_cannot_be_read_are_named(rule):
    with pytest.raises(ValueError, match=r"split '.*' of 'w' with shape \(4, 6\): it (cannot be read|is empty)"):
        resolve_split(rule, "w", nn.Parameter(torch.ones(4, 6)))


@pytest.mark.parametrize("rule", [np.int64(2), np.array([2, 2]), [np.int32(2), 2]])
def test_integers_of_numpy_are_integers(rule):
    assert Muon([("w", nn.Parameter(torch.ones(4, 6)))], split=rule).param_groups[0]["split"] in (
        ("rows:2",),
        ("rows:2,2",),
    )


def test_stacked_experts_of_a_model_are_found():
    specs = model_splits(Model(), {"*.qkv.weight": 3})
    first = {name.removeprefix("blocks.0."): spec for name, spec in specs.items() if name.startswith("blocks.0")}
    assert first == {
        "qkv.weight": "rows:3",
        "conv.weight": None,
        "experts.up": "experts",
        "experts.down": "experts",
        "experts.router.weight": None,
    }
    assert model_splits(Model(), {"*.up": "whole"})["blocks.1.experts.up"] == "whole"
    parts = matrix_parts(Model(), {"*.qkv.weight": 3})
    assert parts["blocks.1.experts.up"] == ((4, 8),) * 3
    assert parts["blocks.1.qkv.weight"] == ((4, 4),) * 3
    assert parts["blocks.1.conv.weight"] == ((4, 12),)


def test_muon_uses_them():
    model = Model()
    muon = Muon(model, split={"*.qkv.weight": 3}).param_groups[0]
    found = {name: spec for name, spec in zip(muon["param_names"], muon["split"], strict=True) if "blocks.1" in name}
    assert found == {
        "blocks.1.qkv.weight": "rows:3",
        "blocks.1.conv.weight": None,
        "blocks.1.experts.up": "experts",
        "blocks.1.experts.down": "experts",
        "blocks.1.experts.router.weight": None,
    }
    assert Muon([("w", nn.Parameter(torch.zeros(3, 4, 8)))]).param_groups[0]["split"] is None


def test_misspelt_patterns_and_missing_names():
    with pytest.raises(ValueError, match=r"no parameter of Model with two dimensions fits \['\*\.qvk\.weight'\]"):
        Muon(Model(), split={"*.qvk.weight": 3})
    with pytest.raises(ValueError, match=r"patterns that no parameter fits: \['qvk'\]"):
        Muon([("qkv", nn.Parameter(torch.zeros(6, 4)))], split={"qvk": 3})
    with pytest.raises(ValueError, match="split goes by parameter names, but the parameters have none"):
        Muon([nn.Parameter(torch.zeros(6, 4))], split={"*": 3})
    with pytest.raises(ValueError, match="split 'rows:5' of 'qkv'"):
        Muon([("qkv", nn.Parameter(torch.zeros(6, 4)))], split=5)


# -------------------------------------------------------------------------------------------------------- named groups


def test_named_groups_of_a_model():
    model = Model()
    optimizer = Muon(
        model,
        lr=0.1,
        weight_decay=0.3,
        groups={
            "slow": {"params": "*.qkv.weight", "lr": 0.01},
            "experts": {"params": ["*.experts.up", "*.experts.down"], "weight_decay": 0.0},
            "head": {"params": "head.*", "lr": 0.5, "betas": (0.5, 0.6)},
        },
    )
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert list(groups) == ["slow", "experts", "head", "muon", "adamw"]
    assert groups["slow"]["param_names"] == ["blocks.0.qkv.weight", "blocks.1.qkv.weight"]
    assert [groups[name]["lr"] for name in groups] == [0.01, 0.1, 0.5, 0.1, 0.1]
    assert [groups[name]["weight_decay"] for name in ("slow", "experts", "muon")] == [0.3, 0.0, 0.3]
    assert groups["head"]["algorithm"] == "adamw" and groups["head"]["betas"] == (0.5, 0.6)
    assert groups["experts"]["split"] == ("experts",) * 4
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": "*.qvk.*"}, r"group 'g': no trainable parameter is left whose name matches \['\*\.qvk\.\*'\]"),
        ({"params": "*.qkv.*"}, "group 'g' would hold hidden matrices and other parameters"),
        ({"lr": 1.0}, "group 'g' needs params, a pattern of names"),
        ({"params": "head.*", "momentum": 0.9}, "does not use 'momentum'"),
    ],
)
def test_unfit_named_groups(options, message):
    with pytest.raises(ValueError, match=message):
        Muon(Model(), groups={"g": options})


def test_named_groups_need_a_model():
    with pytest.raises(ValueError, match="groups by name need a model"):
        Muon([nn.Parameter(torch.zeros(6, 4))], groups={"g": {"params": "*"}})


def test_prefixes_of_wrappers_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    rule = {"0.weight": 3}
    wrapped = torch.compile(nn.Sequential(checkpoint_wrapper(model[0]), model[1]))
    assert next(iter(dict(wrapped.named_parameters()))) == "_orig_mod.0._checkpoint_wrapped_module.weight"
    assert model_splits(model, rule) == {"0.weight": "rows:3", "1.weight": None}
    for each in (rule, lambda name, p: 3 if name == "0.weight" else None):
        assert list(model_splits(wrapped, each).values()) == ["rows:3", None]
    group = Muon(wrapped, split=rule, groups={"first": {"params": "0.weight", "algorithm": "muon"}}).param_groups[0]
    assert (group["name"], group["split"]) == ("first", ("rows:3",))
