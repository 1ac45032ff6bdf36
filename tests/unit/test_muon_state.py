"""State of Muon: saved and loaded, copied, pickled, and taken over from the stock optimizers."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from dmuon_core.optim import Muon, QKClip, QKLayer


def build(**options: Any) -> tuple[list[nn.Parameter], Muon]:
    rng = torch.Generator().manual_seed(3)
    matrices = [nn.Parameter(torch.randn(shape, generator=rng)) for shape in [(3, 5), (5, 3)]]
    biases = [nn.Parameter(torch.randn(shape, generator=rng)) for shape in [(4,), (2, 2)]]
    groups = [{"params": matrices, "name": "m"}, {"params": biases, "name": "b", "algorithm": "adamw"}]
    return [*matrices, *biases], Muon(groups, lr=0.02, **options)


def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        rng = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=rng)
        optimizer.step()


def assert_equal(a: list[nn.Parameter], b: list[nn.Parameter]) -> None:
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_resuming_equals_training_on():
    params, optimizer = build()
    train(params, optimizer, range(6))

    first, saved_by = build()
    train(first, saved_by, range(3))
    saved = through_file(saved_by.state_dict())
    resumed, loaded_by = build()
    for p, q in zip(resumed, first, strict=True):
        p.data.copy_(q)
    loaded_by.load_state_dict(saved)
    train(resumed, loaded_by, range(3, 6))
    assert_equal(resumed, params)


def test_loading_brings_the_saved_numbers():
    _, optimizer = build(momentum=0.5, eps=1e-5, adamw_betas=(0.5, 0.6))
    _, other = build()
    other.load_state_dict(through_file(optimizer.state_dict()))
    muon, adamw = other.param_groups
    assert (muon["momentum"], muon["eps"], adamw["betas"]) == (0.5, 1e-5, (0.5, 0.6))
    assert "momentum" not in adamw


def test_state_of_stock_muon_loads():
    params, optimizer = build()
    theirs = [nn.Parameter(p.detach().clone()) for p in params[:2]]
    ours = [nn.Parameter(p.detach().clone()) for p in params[:2]]
    stock = torch.optim.Muon(theirs, lr=0.03, momentum=0.7)
    train(theirs, stock, range(3))
    optimizer = Muon([{"params": ours, "name": "m"}], ns_dtype=torch.bfloat16)
    for p, q in zip(ours, theirs, strict=True):
        p.data.copy_(q)
    # A deep copy, because loading shares tensors with the dict that it is given.
    optimizer.load_state_dict(copy.deepcopy(stock.state_dict()))
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["algorithm"], group["name"]) == (0.03, 0.7, "muon", "m")
    train(theirs, stock, range(3, 6))
    train(ours, optimizer, range(3, 6))
    assert_equal(ours, theirs)


def test_state_of_stock_adamw_loads():
    params, _ = build()
    theirs = [nn.Parameter(p.detach().clone()) for p in params]
    ours = [nn.Parameter(p.detach().clone()) for p in params]
    stock = torch.optim.AdamW(theirs, lr=0.03, betas=(0.5, 0.9))
    train(theirs, stock, range(3))
    optimizer = Muon([{"params": ours, "algorithm": "adamw"}])
    for p, q in zip(ours, theirs, strict=True):
        p.data.copy_(q)
    optimizer.load_state_dict(copy.deepcopy(stock.state_dict()))
    train(theirs, stock, range(3, 6))
    train(ours, optimizer, range(3, 6))
    assert_equal(ours, theirs)


def test_our_muon_state_loads_into_stock():
    params, _ = build()
    optimizer = Muon(params[:2], lr=0.03)
    train(params[:2], optimizer, range(3))
    theirs = [nn.Parameter(p.detach().clone()) for p in params[:2]]
    stock = torch.optim.Muon(theirs)
    stock.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(theirs, stock, range(3, 5))
    train(params[:2], optimizer, range(3, 5))
    assert_equal(params[:2], theirs)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_train_on_alike(clone):
    params, optimizer = build()
    train(params, optimizer, range(2))
    twin = clone(optimizer)
    twin_params = [p for group in twin.param_groups for p in group["params"]]
    train(params, optimizer, range(2, 4))
    train(twin_params, twin, range(2, 4))
    assert_equal(params, twin_params)
    twin.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "algorithm": "adamw"})
    assert "momentum" not in twin.param_groups[2]


def adamw_as_muon(state: dict[str, Any]) -> None:
    state["param_groups"].reverse()


def amsgrad(state: dict[str, Any]) -> None:
    state["param_groups"][1]["amsgrad"] = True


def other_shape(state: dict[str, Any]) -> None:
    state["state"][1]["momentum_buffer"] = torch.zeros(3, 5)


def fewer_groups(state: dict[str, Any]) -> None:
    del state["param_groups"][1]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (adamw_as_muon, "parameter group 0 uses 'muon'.*uses 'adamw'.*same order"),
        (amsgrad, "parameter group 1 was saved with amsgrad=True"),
        (other_shape, r"'momentum_buffer' of parameter 1 of parameter group 0.*\(3, 5\).*same model"),
        (fewer_groups, "has 1 parameter groups, this optimizer 2.*same groups"),
    ],
)
def test_unfit_state_is_refused_and_nothing_is_loaded(spoil, message):
    params, optimizer = build()
    train(params, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 123.0
    spoil(state)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, values in before["state"].items():
        assert all(torch.equal(after["state"][index][key], value) for key, value in values.items())


def test_hooks_of_the_user_run_around_loading():
    params, optimizer = build()
    train(params, optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    renamed = {**state, "groups": state.pop("param_groups")}
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda _, s: {"state": s["state"], "param_groups": s["groups"]})
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["algorithm"]))
    optimizer.load_state_dict(renamed)
    assert seen == ["muon"]


@pytest.mark.parametrize(("saved", "now"), [(True, False), (False, True), (True, True)])
def test_what_an_update_is_made_of_stays_as_it_was_built(saved: bool, now: bool) -> None:
    def make(normuon: bool, lr: float) -> tuple[nn.Parameter, Muon]:
        weight = nn.Parameter(torch.arange(12.0).reshape(3, 4))
        return weight, Muon([weight], lr=lr, normuon=normuon)

    weight, optimizer = make(saved, 0.25)
    weight.grad = torch.ones(3, 4)
    optimizer.step()
    other, resumed = make(now, 0.5)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["normuon"] is now
    assert resumed.param_groups[0]["lr"] == 0.25
    assert torch.equal(resumed.state[other]["momentum_buffer"], optimizer.state[weight]["momentum_buffer"])
    assert ("second_momentum_buffer" in resumed.state[other]) is (saved and now)
    other.grad = torch.ones(3, 4)
    resumed.step()
    assert ("second_momentum_buffer" in resumed.state[other]) is now


# --------------------------------------------------------------------------------------------------- copies and pickles


def by_name(name: str, p: torch.Tensor) -> int | None:
    return 2 if name == "a" else None


@pytest.mark.parametrize("how", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
@pytest.mark.parametrize("rule", [by_name, lambda name, p: by_name(name, p), {"a": 2}, None])
def test_copies_and_pickles_step_as_the_optimizer_does(how, rule):
    torch.manual_seed(0)
    optimizer = Muon([("a", nn.Parameter(torch.randn(4, 6))), ("b", nn.Parameter(torch.randn(3, 2)))], split=rule)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.randn(p.shape)
    optimizer.step()
    other = how(optimizer)
    assert other.param_groups[0]["split"] == optimizer.param_groups[0]["split"]
    for p, q in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        p.grad = torch.randn(p.shape)
        q.grad = p.grad.clone()
    optimizer.step()
    other.step()
    for p, q in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert p is not q and torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], other.state[q]["momentum_buffer"])
    added = {"params": [("a", nn.Parameter(torch.randn(4, 6)))]}
    if how is not copy.deepcopy and callable(rule) and rule is not by_name:
        with pytest.raises(ValueError, match=r"how to split 'a' is not known.*unpickled.*\"split\" of its own"):
            other.add_param_group(dict(added))
        other.add_param_group({**added, "split": 4})
        assert other.param_groups[1]["split"] == ("rows:4",)
    else:
        other.add_param_group(added)
        assert other.param_groups[1]["split"] == (("rows:2",) if rule else None)


def test_a_copy_says_that_it_does_not_clip():
    params = [("q", nn.Parameter(torch.ones(4, 3))), ("k", nn.Parameter(torch.ones(4, 3)))]
    clip = QKClip({"layer": QKLayer("q", "k", 2)}, threshold=1.0)
    with pytest.warns(UserWarning, match="has no QKClip.*set its attribute qk_clip"):
        other = copy.deepcopy(Muon(params, qk_clip=clip))
    other.qk_clip = clip
    clip.record("layer", torch.tensor([1.0, 4.0]))
    other.step()
    assert torch.equal(other.param_groups[0]["params"][0][:, 0], torch.tensor([1.0, 1.0, 0.5, 0.5]))


# -------------------------------------------------------------------------------------- what no constructor has checked


def stepped(**options: Any) -> tuple[nn.Parameter, Muon]:
    p = nn.Parameter(torch.ones(4, 12))
    optimizer = Muon([("w", p)], **options)
    p.grad = torch.ones(4, 12)
    optimizer.step()
    return p, optimizer


def test_how_updates_are_computed_stays_when_another_run_is_loaded():
    _, saved = stepped(lr=0.5)
    _, optimizer = stepped(ns_form="gram", ns_dtype=torch.float32)
    optimizer.load_state_dict(saved.state_dict())
    group = optimizer.param_groups[0]
    assert (group["ns_form"], group["ns_dtype"], group["lr"]) == ("gram", "float32", 0.5)
    optimizer.step()


def test_only_numbers_of_a_changed_run_are_loaded():
    """How an update is made is the program's: every other option has been changed."""
    changed = {
        "nesterov": False, "ns_coefficients": "polar_express", "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw",
        "ns_dtype": torch.float32, "ns_form": "gram", "batched": True, "maximize": True, "cautious_weight_decay": True,
        "normuon": True, "split": 2,
    }  # fmt: skip
    numbers = {"lr": 0.5, "weight_decay": 0.25, "momentum": 0.5, "eps": 1e-5, "beta2": 0.75}
    _, saved = stepped(**changed, **numbers)
    saved.add_param_group({"params": [("b", nn.Parameter(torch.ones(3)))], "algorithm": "adamw", "betas": (0.5, 0.75)})
    for former, now in ((saved, stepped()[1]), (stepped()[1], stepped(**changed)[1])):
        if former is saved:
            now.add_param_group({"params": [("b", nn.Parameter(torch.ones(3)))], "algorithm": "adamw"})
        before = copy.deepcopy(now.param_groups)
        now.load_state_dict(copy.deepcopy(former.state_dict()))
        for theirs, ours, group in zip(former.param_groups, before, now.param_groups, strict=True):
            for name in group.keys() - {"params", "param_names"}:
                expected = theirs if name in (*numbers, "betas") else ours
                assert group[name] == expected[name], name
        now.step()


def test_a_run_goes_on_with_normuon_as_the_docs_say(tmp_path):
    p, saved = stepped()
    q, optimizer = stepped(normuon=True)
    states = [get_optimizer_state_dict(nn.ParameterDict({"w": w}), o) for w, o in ((p, saved), (q, optimizer))]
    dcp.save(states[0], checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key in checkpoint state_dict: .*second_momentum"):
        dcp.load(states[1], checkpoint_id=tmp_path, no_dist=True)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(states[1], checkpoint_id=tmp_path, no_dist=True, planner=planner)
    set_optimizer_state_dict(nn.ParameterDict({"w": q}), optimizer, states[1])
    assert torch.equal(optimizer.state[q]["momentum_buffer"], saved.state[p]["momentum_buffer"])
    optimizer.step()


@pytest.mark.parametrize(("name", "value"), [("momentum", 3.0), ("beta2", -1.0), ("eps", "small")])
def test_an_option_that_cannot_be_is_not_loaded(name, value):
    p, optimizer = stepped()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0] |= {name: value, "lr": 0.7}
    before = optimizer.state[p]["momentum_buffer"].clone()
    saved["state"][0]["momentum_buffer"] += 1
    with pytest.raises(ValueError, match=f"{name} of the saved parameter group 0 must be"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-3 and torch.equal(optimizer.state[p]["momentum_buffer"], before)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ns_form", "gram", "ns_form must be 'direct' or 'auto' with ns_dtype=torch.bfloat16"),
        ("momentum", 1.0, r"momentum must be a number in \[0, 1\), got 1.0"),
        ("ns_coefficients", [(1.0, 2.0)], "ns_coefficients must be three finite numbers"),
        ("ns_coefficients", {}, "ns_coefficients|wrong type"),
    ],
)
def test_an_option_set_later_is_checked_before_anything_is_written(name, value, message):
    p, optimizer = stepped()
    before = [p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()]
    optimizer.param_groups[0][name] = value
    with pytest.raises(RuntimeError, match=f"{message}.* in parameter group 0. No parameter was updated"):
        optimizer.step()
    assert torch.equal(p, before[0]) and torch.equal(optimizer.state[p]["momentum_buffer"], before[1])


def test_coefficients_may_be_set_later_as_lists():
    p, optimizer = stepped()
    q, other = stepped()
    optimizer.param_groups[0]["ns_coefficients"] = [[2.0, -1.5, 0.5]]
    other.param_groups[0]["ns_coefficients"] = (2.0, -1.5, 0.5)
    optimizer.step()
    other.step()
    assert torch.equal(p, q)


def test_a_dtype_may_be_set_later():
    p, optimizer = stepped()
    q, other = stepped()
    for o, value in ((optimizer, torch.float32), (other, "float32")):
        o.param_groups[0]["ns_dtype"] = value
        o.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize(("algorithm", "key"), [("muon", "momentum_buffer"), ("adamw", "exp_avg")])
def test_state_of_another_dtype_is_named(algorithm, key):
    p, first = (nn.Parameter(torch.ones(4, 6)) for _ in range(2))
    optimizer = Muon([{"params": [("first", first), ("w", p)], "algorithm": algorithm}])
    p.grad, first.grad = torch.ones(4, 6), torch.ones(4, 6)
    optimizer.step()
    optimizer.state[p][key] = optimizer.state[p][key].double()
    before = first.detach().clone()
    with pytest.raises(RuntimeError, match=f"'w': its state '{key}' has dtype torch.float64.*No parameter was updated"):
        optimizer.step()
    assert torch.equal(first, before)


@pytest.mark.parametrize("name", ["amsgrad", "capturable", "differentiable", "foreach", "fused"])
def test_options_of_stock_optimizers_are_not_ignored(name):
    group = {"params": [nn.Parameter(torch.ones(3))], "algorithm": "adamw"}
    with pytest.raises(ValueError, match=f"parameter group 0 has {name}=True, which Muon does not support"):
        Muon([{**group, name: True}])
    Muon([{**group, name: False}])  # as a group of a stock optimizer has it


def test_groups_without_parameters_step_and_save():
    p = nn.Parameter(torch.ones(3, 3))
    optimizer = Muon([{"params": []}, {"params": [p]}, {"params": [], "algorithm": "adamw"}])
    p.grad = torch.ones(3, 3)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("batched", [True, False])
def test_a_bad_gradient_stays_in_its_matrix(bad, batched):
    """As in torch.optim.Muon it is not looked for; but the matrices of a batch do not share it."""
    spoiled, sound, alone = (nn.Parameter(torch.ones(4, 6)) for _ in range(3))
    optimizer = Muon([spoiled, sound], batched=batched, ns_dtype=torch.float32)
    spoiled.grad, sound.grad, alone.grad = torch.full((4, 6), bad), torch.eye(4, 6), torch.eye(4, 6)
    optimizer.step()
    Muon([alone], ns_dtype=torch.float32).step()
    assert spoiled.isnan().all()
    torch.testing.assert_close(sound, alone, rtol=0, atol=1e-8)


def test_state_that_was_matched_by_name_may_have_been_saved_in_another_order():
    def build(*names: str) -> tuple[nn.Module, Muon]:
        model = nn.Module()
        for name in names:
            model.register_parameter(name, nn.Parameter(torch.ones(4, 6)))
        # The optimizer's names may be those in a part of the model, or in a wrapper.
        return model, Muon([(f"wrapper.{name}", p) for name, p in model.named_parameters()])

    (model, optimizer), (other, resumed) = build("a", "b"), build("b", "a")
    for value, p in enumerate(model.parameters(), 1):
        p.grad = torch.full((4, 6), float(value))
    optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer)
    with pytest.raises(ValueError, match="parameter group 0 was saved with other parameters"):
        resumed.load_state_dict(saved)  # goes by position
    set_optimizer_state_dict(other, resumed, saved)
    for name, p in other.named_parameters():
        expected = optimizer.state[model.get_parameter(name)]["momentum_buffer"]
        assert torch.equal(resumed.state[p]["momentum_buffer"], expected)
    assert resumed.param_groups[0]["param_names"] == ["wrapper.b", "wrapper.a"]
