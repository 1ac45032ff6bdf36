"""How Muon's groups are built from models, parameters and dicts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dmuon_core.optim import Muon


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def weight(*shape: int, **kwargs: Any) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, **kwargs))


def test_a_model_gives_two_named_groups_with_parameter_names():
    model = TinyModel()
    muon, adamw = Muon(model).param_groups
    assert (muon["name"], muon["algorithm"]) == ("muon", "muon")
    assert (adamw["name"], adamw["algorithm"]) == ("adamw", "adamw")
    assert muon["param_names"] == [f"blocks.{i}.{part}.weight" for i in range(2) for part in ("up", "down")]
    named = dict(model.named_parameters())
    for group in (muon, adamw):
        assert [id(named[name]) for name in group["param_names"]] == [id(p) for p in group["params"]]
    assert len(muon["params"]) + len(adamw["params"]) == len(named)


def test_frozen_parameters_of_a_model_are_left_out():
    model = TinyModel()
    model.blocks[0].requires_grad_(False)
    model.embed.requires_grad_(False)
    muon, adamw = Muon(model).param_groups
    assert muon["param_names"] == ["blocks.1.up.weight", "blocks.1.down.weight"]
    assert adamw["param_names"] == ["blocks.1.norm.weight", "blocks.1.norm.bias", "blocks.1.up.bias"]


def test_an_empty_group_of_a_model_is_left_out():
    model = TinyModel()
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith(("up.weight", "down.weight")))
    assert [group["name"] for group in Muon(model).param_groups] == ["muon"]
    for name, p in model.named_parameters():
        p.requires_grad_(not name.endswith(("up.weight", "down.weight")))
    assert [group["name"] for group in Muon(model).param_groups] == ["adamw"]


def test_a_model_trains():
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = Muon(model, lr=0.02)
    tokens = torch.arange(7)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 7)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_groups_hold_only_the_options_of_their_algorithm():
    muon, adamw = Muon(TinyModel()).param_groups
    common = {"params", "param_names", "name", "algorithm", "lr", "weight_decay", "eps"}
    common.add("maximize")
    assert set(adamw) == common | {"betas"}
    assert set(muon) == common | {
        "momentum",
        "nesterov",
        "ns_coefficients",
        "ns_steps",
        "adjust_lr_fn",
        "ns_dtype",
        "ns_form",
        "batched",
        "split",
        "normuon",
        "beta2",
        "cautious_weight_decay",
        "compile",
    }


def test_adamw_takes_lr_unless_told_otherwise():
    assert [g["lr"] for g in Muon(TinyModel(), lr=0.3).param_groups] == [0.3, 0.3]
    assert [g["lr"] for g in Muon(TinyModel(), lr=0.3, adamw_lr=0.1).param_groups] == [0.3, 0.1]


def test_zero_is_a_value():
    zeros = {"lr": 0.3, "weight_decay": 0.0, "momentum": 0.0, "ns_steps": 0}
    muon, adamw = Muon(
        TinyModel(), **zeros, adamw_lr=0.0, adamw_eps=0.0, adamw_weight_decay=0.0, adamw_betas=(0.0, 0.0)
    ).param_groups
    assert {key: muon[key] for key in zeros} == zeros
    assert (adamw["lr"], adamw["eps"], adamw["weight_decay"], adamw["betas"]) == (0.0, 0.0, 0.0, (0.0, 0.0))
    (group,) = Muon([{"params": [weight(2, 2)], "lr": 0, "weight_decay": 0, "momentum": 0}]).param_groups
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0, 0, 0)


def test_plain_parameters_and_named_parameters_are_one_muon_group():
    a, b = weight(2, 3), weight(3, 2)
    (group,) = Muon(iter([a, b])).param_groups
    assert group["algorithm"] == "muon"
    assert "param_names" not in group
    (group,) = Muon([("a", a), ("b", b)]).param_groups
    assert group["param_names"] == ["a", "b"]


def test_group_options_override_and_group_dicts_are_not_changed():
    given = {"params": [weight(2, 3)], "lr": 0.5, "ns_coefficients": [2.0, -1.5, 0.5], "tag": "mine"}
    copy = dict(given)
    (group,) = Muon([given], lr=0.1).param_groups
    assert (group["lr"], group["ns_coefficients"], group["tag"]) == (0.5, (2.0, -1.5, 0.5), "mine")
    assert given == copy


def test_a_group_may_be_added_later():
    optimizer = Muon([weight(2, 3)])
    optimizer.add_param_group({"params": weight(3), "algorithm": "adamw", "lr": 0.5})
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)
    assert "momentum" not in optimizer.param_groups[1]


def test_a_refused_group_changes_nothing():
    optimizer = Muon([weight(2, 3)])
    with pytest.raises(ValueError, match="needs a matrix"):
        optimizer.add_param_group({"params": [weight(3)]})
    assert len(optimizer.param_groups) == 1


NAN, INF = float("nan"), float("inf")
BAD_OPTIONS = [
    ("lr", [-0.1, NAN, INF, "fast", None, True], "finite number >= 0"),
    ("lr", [torch.zeros(2)], "one element"),
    ("lr", [torch.tensor(-1.0), torch.tensor(NAN)], "finite number >= 0"),
    ("weight_decay", [-0.1, NAN, None, torch.tensor(-1.0), torch.zeros(2)], "finite number >= 0"),
    ("momentum", [-0.1, 1.0, NAN, None], r"number in \[0, 1\)"),
    ("nesterov", [1, None], "True or False"),
    ("ns_coefficients", [(1.0, 2.0), (1.0, 2.0, NAN), 3.0, "abc", (), [(1, 2, 3), (1, 2)]], "three finite numbers"),
    ("eps", [0.0, -1e-7, 1e-60, NAN, INF, None], r"finite number > 0 in bfloat16"),
    ("ns_steps", [-1, 100, 2.5, True], "integer from 0 to 99"),
    ("adjust_lr_fn", ["match", "Original", 1], "None or one of 'original', 'match_rms_adamw', 'none'"),
    ("ns_dtype", [torch.int32, "half", None], r"one of torch\.bfloat16"),
    ("ns_form", ["Gram", None], "one of 'direct', 'gram', 'auto'"),
    ("ns_form", ["gram"], "'direct' or 'auto' with ns_dtype=torch.bfloat16"),
    *((name, [1, None], "True or False") for name in ("batched", "normuon", "cautious_weight_decay", "compile")),
    ("beta2", [-0.1, 1.0, NAN, None], r"number in \[0, 1\)"),
    ("maximize", [1, None], "True or False"),
    ("adamw_lr", [-0.1, NAN, "fast"], "finite number >= 0"),
    ("adamw_betas", [(0.9,), (0.9, 1.0), (-0.1, 0.9), 0.9, None], r"two numbers in \[0, 1\)"),
    ("adamw_eps", [-1e-8, NAN, None], "finite number >= 0"),
    ("adamw_weight_decay", [-0.1, NAN, None], "finite number >= 0"),
]


@pytest.mark.parametrize(
    ("name", "value", "rule"), [(name, value, rule) for name, values, rule in BAD_OPTIONS for value in values]
)
def test_every_option_is_checked(name, value, rule):
    """In the constructor even if no group uses it, and inside a group of the algorithm that it belongs to."""
    for params in ([weight(2, 3)], [{"params": [weight(3)], "algorithm": "adamw"}]):
        with pytest.raises(ValueError, match=f"Muon: {name} must be .*{rule}.*got"):
            Muon(params, **{name: value})
    short = name.removeprefix("adamw_")
    group = {"params": [weight(2, 3)], "algorithm": "muon" if short == name else "adamw", short: value}
    with pytest.raises(ValueError, match=f"Muon: {short} of parameter group 1 must be .*{rule}.*got"):
        Muon([{"params": [weight(2, 3)]}, group])


@pytest.mark.parametrize(
    ("group", "messages"),
    [
        ({"algorithm": "adam"}, ["unknown algorithm 'adam' in parameter group 0", "did you mean 'adamw'"]),
        ({"algorithm": "Muon"}, ["unknown algorithm 'Muon'", "did you mean 'muon'"]),
        ({"algorithm": None}, ["unknown algorithm None", "'muon' or 'adamw'"]),
        ({"betas": (0.9, 0.99)}, ["does not use 'betas'", "belongs to algorithm='adamw'"]),
        ({"algorithm": "adamw", "momentum": 0.9}, ["does not use 'momentum'", "algorithm='muon'"]),
        ({"algorithm": "adamw", "adamw_lr": 0.9}, ["does not use 'adamw_lr'", "it is called 'lr'"]),
    ],
)
def test_unknown_algorithms_and_options_of_the_other_one(group, messages):
    with pytest.raises(ValueError, match="parameter group 0") as caught:
        Muon([{"params": [weight(2, 3)], **group}])
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "messages"),
    [
        (("norm.weight", weight(3)), ["'norm.weight'", "shape (3,)", 'algorithm="adamw"']),
        (("scale", weight()), ["'scale'", "shape ()", 'algorithm="adamw"']),
        (("phase", weight(2, 3, dtype=torch.complex64)), ["'phase'", "torch.complex64", 'algorithm="adamw"']),
        (("w", nn.Parameter(torch.zeros(2, 3), requires_grad=False)), ["'w'", "frozen", "leave it out"]),
    ],
)
def test_unfit_parameters_are_named(entry, messages):
    with pytest.raises(ValueError, match="Muon: parameter") as caught:
        Muon([("fine", weight(2, 3)), entry])
    for message in messages:
        assert message in str(caught.value)
    with pytest.raises(ValueError, match="parameter 1 of parameter group 0"):
        Muon([weight(2, 3), entry[1]])


def test_frozen_parameters_are_refused_in_adamw_groups_too():
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    with pytest.raises(ValueError, match="'b' is frozen"):
        Muon([{"params": [("b", frozen)], "algorithm": "adamw"}])


def test_duplicates_are_named():
    p = weight(2, 3)
    with pytest.raises(ValueError, match=r"'b' is given twice.*first as parameter 'a'"):
        Muon([("a", p), ("b", p)])
    with pytest.raises(
        ValueError, match=r"parameter 0 of parameter group 1.*first as parameter 1 of parameter group 0"
    ):
        Muon([{"params": [weight(2, 2), p]}, {"params": [p], "algorithm": "adamw"}])


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="TinyModel, in which no parameter requires a gradient"):
        Muon(TinyModel().requires_grad_(False))


def test_torch_refuses_what_is_no_parameter_list():
    with pytest.raises(ValueError, match="empty parameter list"):
        Muon([])
    with pytest.raises(TypeError, match="iterable of Tensors"):
        Muon(weight(2, 3))
    with pytest.raises(TypeError, match="ordered collections"):
        Muon([{"params": {weight(2, 3)}}])
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        Muon(["weight"])
    with pytest.raises(TypeError, match="must be a dict"):
        Muon([{"params": [weight(2, 3)]}, weight(2, 3)])
    with pytest.raises(ValueError, match="non-leaf"):
        Muon([weight(2, 3) * 2])
