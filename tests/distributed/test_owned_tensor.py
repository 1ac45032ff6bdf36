"""OwnedTensor at rest: what torch's tools do with it equals what they do with the whole matrix in one process.

The ranks assert for themselves; a failure shows each rank's traceback. Where no tolerance is given, values are equal
bit for bit: pointwise work on the owner's whole matrix is the same work. Norms add up in another order: 1e-6 relative.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.distributed.harness import run_distributed
from tests.distributed.models import MODELS, hidden_matrix
from tests.distributed.reference import Rows, assert_close, dedicate, full, full_grads, full_weights

UP, DOWN = "blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight"


def _model(**options: Any) -> tuple[nn.Module, Any, dict[str, Tensor]]:
    """A dedicated GPT, its handle, and the weights it must have."""
    torch.manual_seed(5)
    model = MODELS["gpt"]()
    want = {name: p.detach().clone() for name, p in model.named_parameters()}
    return model, dedicate(model, **options), want


def _one() -> tuple[nn.Parameter, Tensor]:
    """A tall owned parameter and its whole value."""
    model, _, want = _model(shard="none")
    return model.get_parameter(UP), want[UP]


def _assert_owned(got: Any, like: nn.Parameter, value: Tensor | None = None) -> None:
    from dmuon_core import OwnedTensor

    assert isinstance(got, OwnedTensor), type(got)
    assert got.owner == like.owner and got.shape == like.shape and got.is_owner == like.is_owner
    rows = like.shape[0] if like.is_owner else 0
    assert tuple(got._local_tensor.shape) == (rows, *like.shape[1:])
    if value is not None:
        assert got.dtype == value.dtype
        assert torch.equal(full(got), value)


# ------------------------------------------------------------------------------------------------- single-tensor work


def _identity() -> None:
    p, value = _one()
    assert isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf
    _assert_owned(p, p, value)
    owners = [None] * dist.get_world_size()
    dist.all_gather_object(owners, (p.is_owner, tuple(p.owner)))
    assert sum(is_owner for is_owner, _ in owners) == 1
    assert owners[p.owner[0]] == (True, tuple(p.owner))
    assert UP in repr(p) and p.numel() == 170 and p.stride() == (10, 1) and p.is_contiguous()


def _copies_and_likes() -> None:
    p, value = _one()
    for made in (p.detach(), p.data, p.clone(), p.detach().clone(), copy.deepcopy(p.detach())):
        _assert_owned(made, p, value)
    deep = copy.deepcopy(p)
    assert isinstance(deep, nn.Parameter) and deep.requires_grad
    _assert_owned(deep, p, value)
    if p.is_owner:
        assert deep._local_tensor.data_ptr() != p._local_tensor.data_ptr()
    _assert_owned(torch.zeros_like(p), p, torch.zeros_like(value))
    _assert_owned(torch.ones_like(p), p, torch.ones_like(value))
    _assert_owned(torch.full_like(p, 3.0), p, torch.full_like(value, 3.0))
    _assert_owned(torch.empty_like(p), p)
    _assert_owned(torch.zeros_like(p, dtype=torch.float64), p, torch.zeros_like(value, dtype=torch.float64))
    _assert_owned(p.to(torch.bfloat16), p, value.to(torch.bfloat16))
    _assert_owned(p.detach().double(), p, value.double())


def _pointwise() -> None:
    p, value = _one()
    q, other = p.detach().clone(), value.clone()
    scalar = torch.tensor(0.5)
    with torch.no_grad():
        _assert_owned(p * 2 + 1, p, value * 2 + 1)
        _assert_owned(p * scalar, p, value * scalar)
        _assert_owned(-p / 3, p, -value / 3)
        _assert_owned(torch.where(p > 0, p, 0.0), p, torch.where(value > 0, value, 0.0))
        _assert_owned(p.square().sqrt().clamp(max=0.1), p, value.square().sqrt().clamp(max=0.1))
        _assert_owned(p.lerp(q * 3, 0.25), p, value.lerp(other * 3, 0.25))
        for x, y in ((q, other),):
            assert x.mul_(0.9) is x
            x.add_(p, alpha=-0.1).addcmul_(p, p, value=0.3).addcdiv_(p, p.square() + 1, value=0.2).lerp_(p, 0.1)
            y.mul_(0.9)
            y.add_(value, alpha=-0.1).addcmul_(value, value, value=0.3)
            y.addcdiv_(value, value.square() + 1, value=0.2).lerp_(value, 0.1)
        _assert_owned(q, p, other)
        _assert_owned(q.zero_(), p, torch.zeros_like(value))
        _assert_owned(q.fill_(2.0), p, torch.full_like(value, 2.0))


def _two_of_different_owners(model: nn.Module) -> tuple[str, str]:
    """Names of two owned matrices of the same shape with different owners."""
    square = [(name, p) for name, p in model.named_parameters() if "attn" in name]
    first, parameter = square[0]
    return first, next(name for name, p in square if p.owner != parameter.owner)


def _two_owners_do_not_mix() -> None:
    model, _, _ = _model(shard="none")
    a, b = _two_of_different_owners(model)
    try:
        _ = model.get_parameter(a).detach() + model.get_parameter(b).detach()
    except RuntimeError as error:
        assert "full_tensor" in str(error) and a in str(error) and b in str(error)
    else:
        raise AssertionError("parameters of two owners were added without a complaint")


def _norms() -> None:
    p, value = _one()
    with torch.no_grad():
        for order in (1.0, 2.0, 3.0, float("inf")):
            got = full(torch.linalg.vector_norm(p, order))
            assert torch.allclose(got, torch.linalg.vector_norm(value, order), rtol=1e-6, atol=0), order
        assert torch.allclose(full(p.norm()), value.norm(), rtol=1e-6, atol=0)


def _norms_of_the_smallest_are_refused() -> None:
    up, _ = _one()
    for p in (-1, float("-inf")):
        with pytest.raises(NotImplementedError, match="full_tensor"):
            torch.linalg.vector_norm(up, p)


def _norm_over_all_parameters() -> None:
    model, _, want = _model()
    parameters = list(model.parameters())
    for order in (1.0, 2.0, float("inf")):
        got = full(nn.utils.get_total_norm([p.detach() for p in parameters], order))
        expected = nn.utils.get_total_norm(list(want.values()), order)
        assert torch.allclose(got, expected, rtol=1e-6, atol=0), order
        for foreach in (False, True):
            got = full(nn.utils.get_total_norm([p.detach() for p in parameters], order, foreach=foreach))
            assert torch.allclose(got, expected, rtol=1e-6, atol=0), (order, foreach)


def _foreach_on_a_mixture() -> None:
    """Owned by either rank, sharded, in one list: what a foreach optimizer passes."""
    model, _, want = _model()
    names = [name for name in want if name.startswith("blocks.0") or name == "head.weight"]
    ours = [model.get_parameter(name).detach().clone() for name in names]
    theirs = [want[name].clone() for name in names]
    for tensors in (ours, theirs):
        torch._foreach_mul_(tensors, 0.5)
        torch._foreach_add_(tensors, tensors, alpha=2)
        torch._foreach_mul_(tensors, [1.0 + i for i in range(len(tensors))])
        torch._foreach_addcmul_(tensors, tensors, tensors, value=0.1)
        torch._foreach_lerp_(tensors, torch._foreach_neg(tensors), 0.3)
        torch._foreach_mul_(tensors, torch.tensor(0.7))
    for name, got, expected in zip(names, ours, theirs, strict=True):
        assert torch.equal(full(got), expected), name
    for got, expected in zip(torch._foreach_norm(ours), torch._foreach_norm(theirs), strict=True):
        assert torch.allclose(full(got), expected, rtol=1e-6, atol=0)


FILLS: dict[str, Callable[[Tensor], Any]] = {
    "normal_": lambda p: nn.init.normal_(p, std=0.02),
    "uniform_": lambda p: nn.init.uniform_(p, -1, 1),
    "trunc_normal_": lambda p: nn.init.trunc_normal_(p, std=0.02),
    "kaiming_uniform_": lambda p: nn.init.kaiming_uniform_(p, a=5**0.5),
    "kaiming_normal_": lambda p: nn.init.kaiming_normal_(p),
    "xavier_uniform_": lambda p: nn.init.xavier_uniform_(p),
    "zeros_": lambda p: nn.init.zeros_(p),
    "constant_": lambda p: nn.init.constant_(p, 0.25),
    "bernoulli_": lambda p: p.data.bernoulli_(0.5),
    "exponential_": lambda p: p.data.exponential_(2.0),
}


def _random_fill(kind: str) -> None:
    """The same numbers as in one process, and the generators of all ranks go on from the same state."""
    model, _, want = _model(shard="none")
    names = [UP, DOWN, "blocks.1.attn.q.weight"]
    torch.manual_seed(11)
    for name in names:
        FILLS[kind](model.get_parameter(name))
    after = torch.rand(4)
    plain = [nn.Parameter(want[name].clone()) for name in names]
    torch.manual_seed(11)
    for p in plain:
        FILLS[kind](p)
    assert torch.equal(after, torch.rand(4)), "the random number generators went apart"
    for name, p in zip(names, plain, strict=True):
        assert torch.equal(full(model.get_parameter(name)), p.detach()), name


def _random_likes() -> None:
    p, value = _one()
    for make in (torch.rand_like, torch.randn_like):
        torch.manual_seed(2)
        got = make(p)
        after = torch.rand(1)
        torch.manual_seed(2)
        _assert_owned(got, p, make(value))
        assert torch.equal(after, torch.rand(1))


def _copy_into_and_out_of() -> None:
    model, handle, _ = _model()
    p = model.get_parameter(UP)
    new = torch.arange(170.0).view(17, 10)
    sharded = distribute_tensor(new * 2, handle.mesh, [Shard(0)])
    with torch.no_grad():
        p.copy_(new)
        _assert_owned(p, p, new)
        p.copy_(sharded)
        _assert_owned(p, p, new * 2)
        p.copy_(p.detach().clone() * 2)
        _assert_owned(p, p, new * 4)
        p.copy_(new.double())
        _assert_owned(p, p, new)
        a, b = (model.get_parameter(name) for name in _two_of_different_owners(model))
        b.copy_(a)
        _assert_owned(b, b, full(a))
        plain = torch.zeros(17, 10)
        plain.copy_(p)
        assert torch.equal(plain, new)
        target = distribute_tensor(torch.zeros(17, 10), handle.mesh, [Shard(0)])
        target.copy_(p)
        assert torch.equal(target.full_tensor(), new)
    p.data.copy_(p.data * 0 + 1)
    _assert_owned(p, p, torch.ones(17, 10))


def _equal_says_the_same_everywhere() -> None:
    model, _, want = _model()
    up, down = model.get_parameter(UP), model.get_parameter(DOWN)
    other = want[UP].clone()
    other[-1, -1] += 1
    assert torch.equal(up, up) and torch.equal(up, up.detach().clone())
    assert torch.equal(up, want[UP]) and torch.equal(want[UP], up)
    assert not torch.equal(up, other) and not torch.equal(up, up + 1)
    assert not torch.equal(up, down)  # of another shape
    q, k = (model.get_parameter(f"blocks.0.attn.{name}.weight") for name in "qk")  # perhaps of different owners
    assert not torch.equal(q, k)
    with torch.no_grad():
        k.copy_(want["blocks.0.attn.q.weight"])
    assert torch.equal(q, k)
    for name, p in model.named_parameters():  # as Lightning's BaseFinetuning looks for a parameter
        assert [n for n, each in model.named_parameters() if torch.equal(each, p)].count(name) == 1


def _gradients_by_hand() -> None:
    p, value = _one()
    p.grad = torch.ones_like(p)
    _assert_owned(p.grad, p, torch.ones_like(value))
    p.grad.add_(p.detach())
    _assert_owned(p.grad, p, value + 1)
    p.grad = None


SINGLE = [
    _identity,
    _copies_and_likes,
    _pointwise,
    _two_owners_do_not_mix,
    _norms,
    _norms_of_the_smallest_are_refused,
    _norm_over_all_parameters,
    _foreach_on_a_mixture,
    _random_likes,
    _copy_into_and_out_of,
    _equal_says_the_same_everywhere,
    _gradients_by_hand,
]


@pytest.mark.parametrize("check", SINGLE, ids=lambda check: check.__name__.strip("_"))
def test_owned_tensor(check: Callable[[], None]) -> None:
    run_distributed(check, 2)


@pytest.mark.parametrize("kind", FILLS)
def test_random_fills_draw_what_one_process_draws(kind: str) -> None:
    run_distributed(_random_fill, 2, kind)


def test_owners_of_four_ranks() -> None:
    run_distributed(_norm_over_all_parameters, 4)
    run_distributed(_foreach_on_a_mixture, 4)


# ------------------------------------------------------------------------------------------------- state dict and files


def _state_dict() -> None:
    model, _, want = _model()
    state = model.state_dict()
    assert list(state) == list(want)
    for name, value in state.items():
        assert value.shape == want[name].shape and torch.equal(full(value), want[name]), name
    _assert_owned(state[UP], model.get_parameter(UP))
    saved = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    result = model.load_state_dict(saved)
    assert not result.missing_keys and not result.unexpected_keys
    assert_close(full_weights(model), want, 0.0, "weights after load_state_dict")


def _load_plain_matrices() -> None:
    """A state dict of plain full tensors, the same on all ranks, into a model without sharded parameters."""
    model, _, want = _model(shard="none")
    doubled = {name: value * 2 for name, value in want.items()}
    model.load_state_dict(doubled)
    assert_close(full_weights(model), doubled, 0.0, "weights")
    _assert_owned(model.get_parameter(UP), model.get_parameter(UP), doubled[UP])


def _load_of_a_wrong_shape() -> None:
    model, _, want = _model(shard="none")
    try:
        model.load_state_dict({**want, UP: torch.zeros(16, 10)})
    except RuntimeError as error:
        assert UP in str(error) and "size mismatch" in str(error)
    else:
        raise AssertionError("a matrix of another shape was loaded")
    assert_close({UP: full(model.get_parameter(UP))}, {UP: want[UP]}, 0.0, "weight after the failed load")


def _torch_save() -> None:
    model, _, want = _model()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = torch.load(file, weights_only=False)
    _assert_owned(state[UP], model.get_parameter(UP), want[UP])
    model.load_state_dict(state)
    assert_close(full_weights(model), want, 0.0, "weights")
    size = len(file.getvalue())
    assert size < 3 * sum(p._local_tensor.numel() * 4 for p in model.parameters()) + 200_000


def _full_state_dict() -> None:
    """The one-file format: whole plain tensors out, into a plain model, and in again through the same tools."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    model, _, want = _model()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(type(value) is Tensor for value in state.values())
    assert_close(state, want, 0.0, "full state dict")
    plain = MODELS["gpt"]()
    plain.load_state_dict(state)
    offloaded = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        assert_close(offloaded, want, 0.0, "full state dict on rank 0")
    else:
        assert offloaded == {}
    half = {name: value * 0.5 for name, value in state.items()}
    set_model_state_dict(model, dict(half), options=StateDictOptions(full_state_dict=True))
    assert_close(full_weights(model), half, 0.0, "weights after set_model_state_dict")
    _assert_owned(model.get_parameter(UP), model.get_parameter(UP), half[UP])


def _sharded_state_dict() -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, _, want = _model()
    state = {name: value.clone() for name, value in get_model_state_dict(model).items()}
    assert all(isinstance(value, DTensor) for value in state.values())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    set_model_state_dict(model, state)
    assert_close(full_weights(model), want, 0.0, "weights")


FILES = [_state_dict, _load_plain_matrices, _load_of_a_wrong_shape, _torch_save, _full_state_dict, _sharded_state_dict]


@pytest.mark.parametrize("check", FILES, ids=lambda check: check.__name__.strip("_"))
def test_state_dict(check: Callable[[], None]) -> None:
    run_distributed(check, 2)


# --------------------------------------------------------------------------------- torch's optimizers, clipping, scaler


# A large eps: where a gradient is as small as its rounding error, m / (sqrt(v) + 1e-8) is a full step of random sign.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-4, amsgrad=True, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, eps=1e-3, momentum=0.9),
}


def _stock_training(kind: str, distributed: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    rank, world = 0, 1
    if distributed:
        dedicate(model)
        rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(3):
        Rows("gpt", step, 0, rank, world).loss(model).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        assert full(norm) > 0.2
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_torch_optimizers_and_clipping_run_on_it(kind: str) -> None:
    """Gradients differ by rounding (4e-8), which Adam divides by at least eps: 4e-8 / 1e-4 * lr is 4e-6; 1e-5 it is."""
    reference = _stock_training(kind, False)
    for got in run_distributed(_stock_training, 2, kind, True):
        assert_close(got, reference, 1e-5, "weights")


def _scaler(overflow: bool) -> dict[str, Any]:
    """Dynamic loss scaling. With `overflow` one element of one owned gradient is infinite: nobody may step."""
    model, _, want = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = Rows("gpt", 0, 0, dist.get_rank(), dist.get_world_size()).loss(model)
    scaler.scale(loss).backward()
    if overflow and model.get_parameter(UP).is_owner:
        model.get_parameter(UP).grad._local_tensor[3, 3] = torch.inf
    scaler.unscale_(optimizer)
    grads = full_grads(model) if not overflow else {}
    scaler.step(optimizer)
    scaler.update()
    weights = full_weights(model)
    return {
        "scale": scaler.get_scale(),
        "moved": [name for name, value in weights.items() if not torch.equal(value, want[name])],
        "grads": grads,
    }


def test_gradient_scaler_unscales() -> None:
    """1024 is a power of two, so scaling is exact; 1e-6 is what the order of sums leaves."""
    torch.manual_seed(5)
    model = MODELS["gpt"]()
    Rows("gpt", 0, 0, 0, 1).loss(model).backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    for result in run_distributed(_scaler, 2, False):
        assert result["scale"] == 1024.0 and UP in result["moved"]
        assert_close(result["grads"], want, 1e-6, "unscaled gradients")


def test_gradient_scaler_skips_on_all_ranks_when_one_owner_overflows() -> None:
    for result in run_distributed(_scaler, 2, True):
        assert result["scale"] == 512.0 and result["moved"] == []


# -------------------------------------------------------------------------------------- module-wide moves of parameters


def _to_empty_after_meta() -> None:
    """Built on meta, dedicated, materialized: owners get memory, the others 0 rows, and an init fills all of it."""
    with torch.device("meta"):
        model = MODELS["gpt"]()
    dedicate(model)
    model.to_empty(device="cpu")
    names = [name for name, p in model.named_parameters() if hidden_matrix(name, p)]
    for name in names:
        p = model.get_parameter(name)
        assert isinstance(p, nn.Parameter) and p.device.type == "cpu"
        _assert_owned(p, p)
    torch.manual_seed(4)
    for name, p in model.named_parameters():
        if hidden_matrix(name, p):
            nn.init.normal_(p, std=0.05)
        else:
            nn.init.constant_(p, 0.5)
    torch.manual_seed(4)
    plain = MODELS["gpt"]()
    torch.manual_seed(4)
    for name, p in plain.named_parameters():
        if hidden_matrix(name, p):
            nn.init.normal_(p, std=0.05)
        else:
            nn.init.constant_(p, 0.5)
    assert_close(full_weights(model), dict(plain.named_parameters()), 0.0, "initial weights")
    loss = Rows("gpt", 0, 0, dist.get_rank(), dist.get_world_size()).loss(model)
    expected = Rows("gpt", 0, 0, dist.get_rank(), dist.get_world_size()).loss(plain)
    assert torch.allclose(loss, expected, atol=1e-6, rtol=0)  # the same sums, through other memory
    loss.backward()
    assert sorted(name for name, grad in full_grads(model).items() if grad is not None) == sorted(full_weights(plain))


def _to_another_dtype() -> None:
    """`.to(dtype)` after dedication: the type survives, and the forward computes in the new dtype."""
    model, handle, want = _model(shard="none")
    model.to(torch.float64)
    for name, p in model.named_parameters():
        if hidden_matrix(name, p):
            _assert_owned(p, p, want[name].double())
    plain = MODELS["gpt"]().to(torch.float64)
    plain.load_state_dict({name: value.double() for name, value in want.items()})
    rows = Rows("gpt", 0, 0, dist.get_rank(), dist.get_world_size())
    loss, expected = rows.loss(model), rows.loss(plain)
    assert torch.allclose(loss, expected, atol=1e-6, rtol=0)  # loss_of casts the logits to float32
    loss.backward()
    expected.backward()
    for param in handle.params:
        assert param.rest.grad.dtype == torch.float64
        mean = plain.get_parameter(param.fqn).grad / 2
        dist.all_reduce(mean)
        assert torch.allclose(full(param.rest.grad), mean, atol=1e-9, rtol=0), param.fqn


def _apply_of_modules() -> None:
    """half(), apply() and requires_grad_() walk over parameters at rest."""
    model, _, want = _model(shard="none")
    model.bfloat16()
    _assert_owned(model.get_parameter(UP), model.get_parameter(UP), want[UP].bfloat16())
    model.float()
    model.requires_grad_(False)
    assert not model.get_parameter(UP).requires_grad
    model.requires_grad_(True)

    @torch.no_grad()
    def shrink(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.mul_(0.5)

    before = full(model.get_parameter(UP))
    model.apply(shrink)
    _assert_owned(model.get_parameter(UP), model.get_parameter(UP), before * 0.5)


MOVES = [_to_empty_after_meta, _to_another_dtype, _apply_of_modules]


@pytest.mark.parametrize("check", MOVES, ids=lambda check: check.__name__.strip("_"))
def test_moves_of_the_whole_module(check: Callable[[], None]) -> None:
    run_distributed(check, 2)
