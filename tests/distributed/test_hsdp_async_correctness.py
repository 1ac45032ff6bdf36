"""The asynchronous publish of new weights: the same numbers as the synchronous one, and never too late.

After an optimizer step the owners' weights are on their way to their replicas until something needs them. Whatever
comes in between, everybody must see what one process would see. Also a script: `torchrun --nproc_per_node=4` of this
file.
"""

from __future__ import annotations

import copy
import io
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

if __name__ == "__main__":  # torchrun puts this file's folder on the path, not the repository's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.distributed.checks import Checks
from tests.distributed.harness import run_distributed
from tests.distributed.models import MODELS
from tests.distributed.reference import (
    Recipe,
    ReferenceMuon,
    Rows,
    assert_at_rest,
    assert_close,
    assert_identical,
    assert_same_training,
    dedicate,
    full,
    full_grads,
    full_weights,
    make_muon,
    mean_over_ranks,
    train_dmuon,
    train_reference,
)

STEPS = 20
check = Checks()
MODES = {"z3": {"zero3": True}, "z2": {"zero3": False}}


# ------------------------------------------------------------------------------------------------------- async and sync


@check.of(
    g2_r2={"replicas": 2},
    g2_r2_z2={"replicas": 2, "zero3": False},
    g1_r4={"replicas": 4},
    g2_r2_clip_accumulate={"replicas": 2, "accumulate": 2, "no_sync": "ours", "max_norm": 0.2, "steps": 6},
)
def _async_and_sync_are_bit_identical(**options: Any) -> None:
    """Losses, gradients, norms, weights and optimizer state; and both equal one process."""
    recipe = Recipe(**{"steps": STEPS, "default_targets": True, **options})
    behind, in_step = train_dmuon(recipe), train_dmuon(Recipe(**{**vars(recipe), "replicate_async": False}))
    if behind is not None and in_step is not None:
        assert behind.state
        assert len(behind.losses) == recipe.steps
        assert_identical(behind, in_step)
        assert_same_training(behind, train_reference(recipe))


class _Pair:
    """A dedicated model on a 2 x 2 mesh and a plain one, trained with the same data; each step checks the loss."""

    def __init__(self, zero3: bool = True, shard: str = "blocks", **options: Any) -> None:
        torch.manual_seed(0)
        self.ours, self.plain = MODELS["gpt"](), MODELS["gpt"]()
        self.plain.load_state_dict(self.ours.state_dict())
        self.handle = dedicate(self.ours, replicas=2, zero3=zero3, shard=shard, **options)
        self.optimizer, self.reference = make_muon(self.ours), ReferenceMuon(self.plain)
        self.steps = 0

    def backward(self) -> None:
        step, self.steps = self.steps, self.steps + 1
        got = Rows("gpt", step, 0, dist.get_rank(), 4).loss(self.ours)
        want = Rows("gpt", step, 0, 0, 1).loss(self.plain)
        got.backward()
        want.backward()
        assert abs(mean_over_ranks(got.item()) - want.item()) <= 1e-6, f"loss of step {step}"
        assert_close(full_grads(self.ours), {n: p.grad for n, p in self.plain.named_parameters()}, 1e-6, "gradients")

    def step(self) -> None:
        """Leaves the new weights on their way, which the test relies on."""
        self.optimizer.step()
        self.reference.step()
        assert any(group.publication.is_pending for group in self.handle.groups)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.plain.zero_grad()

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.backward()
            self.step()
            self.zero_grad()

    def assert_equal(self, atol: float = 1e-5) -> None:
        import dmuon_core

        assert_close(full_weights(self.ours), dict(self.plain.named_parameters()), atol, "weights")
        dmuon_core.check_invariants(self.ours)
        assert_at_rest(self.handle)


@check
def _a_publish_is_pending_until_it_is_needed() -> None:
    """Asynchronous: from the step to the group's own forward, one group after the other. Synchronous: never."""

    def pending() -> list[bool]:
        return [group.publication.is_pending for group in pair.handle.groups]

    pair = _Pair()
    pair.train(2)
    assert pending() == [True] * 3
    seen: list[list[bool]] = []
    for block in pair.ours.blocks:
        block.norm1.register_forward_pre_hook(lambda module, args: seen.append(pending()))
    pair.backward()
    # Waiting blocks the host here, so the next group is not prefetched while its new weights are on their way.
    assert seen == [[False, True, True], [False, False, True], [False] * 3]
    quiet = dedicate(MODELS["gpt"](), replicas=2, replicate_async=False)
    optimizer = make_muon(quiet.model)
    Rows("gpt", 0, 0, dist.get_rank(), 4).loss(quiet.model).backward()
    optimizer.step()
    assert not any(group.publication.is_pending for group in quiet.groups)


# -------------------------------------------------------------------------------------------- reads right after a step


def _read_full_tensor(model: nn.Module) -> dict[str, Tensor]:
    return full_weights(model)


def _read_state_dict(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(value) for name, value in model.state_dict().items()}


def _read_full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def _read_detached_copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(copy.deepcopy(p.detach())) for name, p in model.named_parameters()}


def _read_norms(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(torch.linalg.vector_norm(p.detach())) for name, p in model.named_parameters()}


READS: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "full_tensor": _read_full_tensor,
    "state_dict": _read_state_dict,
    "full_state_dict": _read_full_state_dict,
    "deepcopy": _read_detached_copy,
    "norms": _read_norms,
}


@check.of(**{name: {"read": name} for name in READS})
def _read_right_after_a_step(read: str) -> None:
    pair = _Pair()
    for _ in range(2):
        pair.train()
        got = READS[read](pair.ours)
        want = {name: p.detach() for name, p in pair.plain.named_parameters()}
        if read == "norms":
            want = {name: torch.linalg.vector_norm(p) for name, p in want.items()}
        assert_close(got, want, 1e-5, f"what {read} sees")
    pair.train()
    pair.assert_equal()


@check
def _every_replica_sees_the_new_weights_locally() -> None:
    """`to_local()`, an alias from before the step, and a pickle: each on the replica that the weights travel to."""
    pair = _Pair()
    pair.train()
    param = pair.handle.params[0]
    alias, data = param.rest.detach(), param.rest.data
    pair.train()
    want = pair.plain.get_parameter(param.fqn)
    holds = dist.get_rank() % 2 == param.owner
    for view in (alias, data, param.rest):
        assert view.to_local().shape[0] == (want.shape[0] if holds else 0)
    if holds:
        for view in (alias, data, param.rest):
            assert (view.to_local() - want).abs().max() <= 1e-5
    pair.train()
    assert_close({"alias": full(alias)}, {"alias": want}, 1e-5, "the alias")
    pair.train()
    file = io.BytesIO()
    torch.save(param.rest.detach(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    if holds:
        assert (loaded.to_local() - want).abs().max() <= 1e-5
    pair.assert_equal()


@check
def _checkpoint_right_after_a_step() -> None:
    """torch.distributed.checkpoint writes the new weights; what it reads right after a step is not overwritten."""
    import torch.distributed.checkpoint as dcp

    folder: list[Any] = [tempfile.mkdtemp(prefix="dmuon-test-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    pair = _Pair()
    pair.train()
    dcp.save({"model": pair.ours.state_dict()}, checkpoint_id=folder[0])
    kept = copy.deepcopy(pair.plain.state_dict())
    pair.train()
    state = {"model": pair.ours.state_dict()}
    pair.train()
    dcp.load(state, checkpoint_id=folder[0])
    pair.plain.load_state_dict(kept)
    pair.assert_equal()
    pair.train()
    pair.assert_equal()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


# ------------------------------------------------------------------------------------------- writes right after a step


@torch.no_grad()
def _in_place(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(0.5)


@torch.no_grad()
def _data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.fill_(0.125)


@torch.no_grad()
def _foreach(model: nn.Module) -> None:
    torch._foreach_mul_(list(model.parameters()), 0.25)


@torch.no_grad()
def _copy(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        torch.manual_seed(9)
        p.copy_(MODELS["gpt"]().get_parameter(name).detach())


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: value.detach().clone() * 0.75 for name, value in model.state_dict().items()})


def _load_full(model: nn.Module) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    torch.manual_seed(9)
    state = MODELS["gpt"]().state_dict()
    if any(isinstance(p, DTensor) for p in model.parameters()):
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(state)


def _load_from_rank_0(model: nn.Module) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    torch.manual_seed(9)
    state = MODELS["gpt"]().state_dict()
    if any(isinstance(p, DTensor) for p in model.parameters()):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=options)
    else:
        model.load_state_dict(state)


WRITES: dict[str, Callable[[nn.Module], None]] = {
    "in_place": _in_place,
    "data": _data,
    "foreach": _foreach,
    "copy": _copy,
    "load_state_dict": _load,
    "set_model_state_dict": _load_full,
    "set_model_state_dict_from_rank_0": _load_from_rank_0,
}


@check.of(**{f"{name}-{mode}": {"write": name, **options} for name in WRITES for mode, options in MODES.items()})
def _write_right_after_a_step(write: str, zero3: bool) -> None:
    """The write wins over weights that are still on their way."""
    pair = _Pair(zero3, shard="none")
    _freeze_what_is_not_owned(pair)
    pair.train()
    for part in (pair.ours, pair.plain):
        WRITES[write](part)
    pair.assert_equal()
    pair.train(2)
    pair.assert_equal()


def _freeze_what_is_not_owned(pair: _Pair) -> None:
    """Nobody averages its gradients without fully_shard."""
    owned = {param.fqn for param in pair.handle.params}
    for part in (pair.ours, pair.plain):
        for name, p in part.named_parameters():
            p.requires_grad_(name in owned)
            p.grad = None
    pair.optimizer, pair.reference = make_muon(pair.ours), ReferenceMuon(pair.plain)


@check.of(**MODES)
def _parameters_replaced_right_after_a_step(zero3: bool) -> None:
    """`load_state_dict(assign=True)`: weights on their way belong to the parameters that are gone."""
    pair = _Pair(zero3, shard="none")
    _freeze_what_is_not_owned(pair)
    pair.train()
    state = {name: value.detach().clone() * 0.75 for name, value in pair.ours.state_dict().items()}
    pair.train()
    pair.ours.load_state_dict(state, assign=True)
    pair.plain.load_state_dict({name: full(value) for name, value in state.items()})
    pair.assert_equal()
    _freeze_what_is_not_owned(pair)  # and new optimizers, as always after such a load
    pair.train(2)
    pair.assert_equal()


@check
def _a_new_dtype_right_after_a_step() -> None:
    """`model.double()` makes new tensors from those that are on their way."""
    pair = _Pair(shard="none")
    _freeze_what_is_not_owned(pair)
    pair.train()
    for part in (pair.ours, pair.plain):
        part.double()
        part.float()
    pair.assert_equal()
    pair.train(2)
    pair.assert_equal()


# --------------------------------------------------------------------------------------------- what comes between steps


@check.of(**MODES)
def _evaluation_between_steps(zero3: bool) -> None:
    pair = _Pair(zero3)
    for _ in range(3):
        pair.backward()
        _evaluate(pair)
        pair.step()
        _evaluate(pair)
        pair.zero_grad()
        _evaluate(pair)
    pair.assert_equal()


@torch.no_grad()
def _evaluate(pair: _Pair) -> None:
    got = Rows("gpt", 77, 0, dist.get_rank(), 4).loss(pair.ours).item()
    assert abs(mean_over_ranks(got) - Rows("gpt", 77, 0, 0, 1).loss(pair.plain).item()) <= 1e-6


@check.of(**MODES)
def _two_steps_without_a_forward(zero3: bool) -> None:
    """The second publish follows the first one before anything has read it."""
    pair = _Pair(zero3)
    pair.train()
    pair.backward()
    for _ in range(3):
        pair.step()
    pair.zero_grad()
    pair.train()
    pair.assert_equal()


@check.of(**MODES)
def _zero_grad_right_after_a_step_and_steps_without_gradients(zero3: bool) -> None:
    pair = _Pair(zero3)
    pair.train()
    pair.step()  # nothing to do, in both; publishes what is there
    pair.train()
    pair.ours.zero_grad()
    pair.train()
    pair.assert_equal()


@check.of(**MODES)
def _a_forward_that_raises_right_after_a_step(zero3: bool) -> None:
    pair = _Pair(zero3)
    pair.train()

    def explode(*_: Any) -> None:
        raise KeyError("the user's own error")

    for index in (0, 2):
        removable = pair.ours.blocks[index].attn.q.register_forward_pre_hook(explode)
        with pytest.raises(KeyError, match="own error"):
            Rows("gpt", 7, 0, dist.get_rank(), 4).loss(pair.ours)
        removable.remove()
        pair.zero_grad()
        pair.train()
    pair.assert_equal()


@check
def _a_single_block_right_after_a_step() -> None:
    """Groups are waited for one by one: a block called alone sees its new weights, and later the others see theirs."""
    pair = _Pair()
    pair.train()
    x = torch.randn(2, 7, 10, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (pair.ours.blocks[1](x) - pair.plain.blocks[1](x)).abs().max() <= 1e-5
    assert [group.publication.is_pending for group in pair.handle.groups] == [True, False, True]
    pair.train()
    pair.assert_equal()


@check
def _two_optimizers() -> None:
    """Each publishes what it steps, in whatever order they come."""
    pair = _Pair()
    owned = [param.rest for param in pair.handle.params]
    halves = [owned[: len(owned) // 2], owned[len(owned) // 2 :]]
    rest = [p for p in pair.ours.parameters() if not any(p is o for o in owned)]
    parts = [torch.optim.SGD(half, lr=0.1) for half in halves] + [torch.optim.SGD(rest, lr=0.1)]
    plain = torch.optim.SGD(pair.plain.parameters(), lr=0.1)
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        pair.backward()
        for index in order:
            parts[index].step()
        plain.step()
        pair.ours.zero_grad()
        pair.plain.zero_grad()
    pair.assert_equal()


# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", check.slow_but("async_and_sync_are_bit_identical-g2_r2", "a_publish_is_pending_until_it_is_needed")
)
def test_on_four_ranks(name: str) -> None:
    run_distributed(check.run, 4, name)


if __name__ == "__main__":
    check.run_as_script()
