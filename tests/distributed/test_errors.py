"""Misuse ends in an exception on every rank that names the parameter (or argument) and the remedy; never in a hang."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.distributed.harness import expect_errors
from tests.distributed.models import GPT, MODELS, batch_for, hidden_matrix
from tests.distributed.reference import Rows, dedicate

Q = "blocks.0.attn.q.weight"


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _core():
    import dmuon_core

    return dmuon_core


def _predicate_matches_nothing() -> None:
    _core().dedicate_params(GPT(), _mesh(), lambda name, p: False)


def _no_default_target() -> None:
    """A model of an embedding and a norm: there is no hidden matrix to find."""
    _core().dedicate_params(nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4)), _mesh())


def _predicate_differs_between_ranks() -> None:
    rank = dist.get_rank()
    _core().dedicate_params(GPT(), _mesh(), lambda name, p: hidden_matrix(name, p) and (rank == 0 or name != Q))


def _shapes_differ_between_ranks() -> None:
    _core().dedicate_params(GPT(hidden=17 + dist.get_rank()), _mesh(), hidden_matrix)


def _partitions_differ_between_ranks() -> None:
    """As with two releases of this package in one run: rank 1 comes to other owners for the same matrices."""
    import dmuon_core.plan

    compute = dmuon_core.plan.compute_balanced_assignment

    def computed_elsewhere(*args: Any, **kwargs: Any) -> Any:
        found = compute(*args, **kwargs)
        slots = list(found.slots)
        at = [spec.fqn for spec in found.specs].index(Q)
        slots[at] = (slots[at] + dist.get_rank()) % found.num_slots
        return dataclasses.replace(found, slots=tuple(slots))

    dmuon_core.plan.compute_balanced_assignment = computed_elsewhere
    _core().dedicate_params(GPT(), _mesh(), hidden_matrix)


def _bound_on_bytes_is_too_low() -> None:
    _core().dedicate_params(GPT(), _mesh(), hidden_matrix, max_owned_bytes=700)


def _bound_on_bytes_differs_between_ranks() -> None:
    _core().dedicate_params(GPT(), _mesh(), hidden_matrix, max_owned_bytes=10_000_000 + dist.get_rank())


def _hook_on_a_target() -> None:
    model = GPT()
    model.get_parameter(Q).register_hook(lambda grad: grad * 0)
    _core().dedicate_params(model, _mesh(), hidden_matrix)


def _hook_on_an_owned_parameter() -> None:
    model = GPT()
    _core().dedicate_params(model, _mesh(), hidden_matrix)
    assert model.get_parameter(Q).square().register_hook(lambda grad: grad)  # of a result it runs
    model.get_parameter(Q).register_hook(lambda grad: grad * 0)


def _described_with_arguments_after_dedication() -> None:
    model = GPT()
    _core().dedicate_params(model, _mesh(), hidden_matrix)
    _core().describe(model, 2)


def _after_fully_shard() -> None:
    model = GPT()
    for block in model.blocks:
        fully_shard(block, mesh=_mesh())
    _core().dedicate_params(model, _mesh(), hidden_matrix)


def _twice() -> None:
    model = GPT()
    _core().dedicate_params(model, _mesh(), hidden_matrix)
    _core().dedicate_params(model, _mesh(), hidden_matrix)


def _twice_through_a_parent() -> None:
    model = GPT()
    _core().dedicate_params(model.blocks[0], _mesh(), lambda name, p: p.ndim == 2)
    _core().dedicate_params(model, _mesh(), hidden_matrix)


def _strict_boundary_without_a_match() -> None:
    _core().dedicate_params(
        GPT(), _mesh(), hidden_matrix, hook_boundary_predicate=lambda module: isinstance(module, nn.Conv2d)
    )


def _strict_boundary_with_a_partial_match() -> None:
    """Only the MLPs match; the attention matrices have no ancestor that does."""
    _core().dedicate_params(
        GPT(), _mesh(), hidden_matrix, hook_boundary_predicate=lambda module: type(module).__name__ == "MLP"
    )


def _complex_target() -> None:
    model = GPT()
    model.blocks[0].spectrum = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
    _core().dedicate_params(model, _mesh(), hidden_matrix)


def _vector_target() -> None:
    _core().dedicate_params(GPT(), _mesh(), lambda name, p: "blocks." in name)


def _optimizer_before_dedication() -> None:
    """At the latest the first step has to say it: this optimizer holds parameters that are in no module any more."""
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dedicate(model)
    Rows("gpt", 0, 0, dist.get_rank(), dist.get_world_size()).loss(model).backward()
    optimizer.step()


def _muon_before_dedication() -> None:
    model = GPT()
    optimizer = _core().Muon(model, lr=0.1)
    dedicate(model)
    Rows("gpt", 0, 0, dist.get_rank(), dist.get_world_size()).loss(model).backward()
    optimizer.step()


def _sharded_matrix_in_a_muon_group() -> None:
    model = GPT()
    dedicate(model)
    _core().Muon([{"params": [("head.weight", model.head.weight)], "algorithm": "muon"}], lr=0.1)


def _step_with_other_parameters(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    """A trainer shards the model and puts the new parameters into the groups of an optimizer that was built before."""
    model = GPT()
    optimizer = make(model)
    names = {id(p): name for name, p in model.named_parameters()}
    fully_shard(model)
    for group in optimizer.param_groups:
        group["params"] = [model.get_parameter(names[id(p)]) for p in group["params"]]
    model(torch.arange(6).view(2, 3)).sum().backward()
    before = [p.full_tensor() for p in model.parameters()]
    try:
        optimizer.step()
    finally:
        assert all(torch.equal(a, p.full_tensor()) for a, p in zip(before, model.parameters(), strict=True))


def _muon_steps_what_a_trainer_has_sharded() -> None:
    _step_with_other_parameters(lambda model: _core().Muon(model, lr=0.1))


def _owned_optimizer_steps_what_a_trainer_has_sharded() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return _core().OwnedOptimizer(model, matrix=torch.optim.Muon, other=torch.optim.AdamW)

    _step_with_other_parameters(make)


def _weight_used_outside_its_module() -> None:
    """The root reads a weight that only the block's forward unshards."""

    class Reads(GPT):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.tok_emb(tokens)
            return self.head(F.linear(x, self.blocks[0].attn.q.weight))

    model = Reads()
    dedicate(model)
    model(batch_for("gpt", 0, 0, 0, 1)[0])


def _never_materialized() -> None:
    with torch.device("meta"):
        model = GPT()
    dedicate(model, shard="none")
    model(batch_for("gpt", 0, 0, 0, 1)[0])


# What is done wrong -> every one of these texts is in the message on every rank, whatever the case of letters.
MISUSE: dict[Callable[[], None], list[str]] = {
    _predicate_matches_nothing: ["predicate"],
    _no_default_target: ["predicate"],
    _predicate_differs_between_ranks: [Q, "rank"],
    _partitions_differ_between_ranks: [f"the owner of '{Q}'", "rank 0", "rank 1"],
    _bound_on_bytes_is_too_low: ["max_owned_bytes=700", "hold 1400", "raise it"],
    _bound_on_bytes_differs_between_ranks: ["the arguments", "10000000", "10000001"],
    _hook_on_a_target: [Q, "register_hook", "register_post_accumulate_grad_hook"],
    _hook_on_an_owned_parameter: [Q, "register_hook", "register_post_accumulate_grad_hook"],
    _described_with_arguments_after_dedication: ["GPT", "dedicated already", "describe(model)"],
    _shapes_differ_between_ranks: ["mlp.up.weight", "rank"],
    _after_fully_shard: [Q, "fully_shard", "before"],
    _twice: ["dedicate_params", "once"],
    _twice_through_a_parent: [Q],
    _strict_boundary_without_a_match: [Q, "hook_boundary_predicate"],
    _strict_boundary_with_a_partial_match: [Q, "hook_boundary_predicate"],
    _complex_target: ["blocks.0.spectrum", "complex"],
    _vector_target: ["blocks.0.norm1.weight"],
    _optimizer_before_dedication: ["optimizer", "after", "weight"],
    _muon_before_dedication: ["optimizer", "after", "weight"],
    _sharded_matrix_in_a_muon_group: ["head.weight", "adamw"],
    _muon_steps_what_a_trainer_has_sharded: [Q, "sharded, not owned", "DMuonPlugin"],
    _owned_optimizer_steps_what_a_trainer_has_sharded: ["other parameters", "after the model was sharded"],
    _weight_used_outside_its_module: [Q, "full_tensor", "hook_boundary_predicate"],
    _never_materialized: [".weight", "to_empty"],
}


@pytest.mark.parametrize("misuse", MISUSE, ids=lambda misuse: misuse.__name__.strip("_"))
def test_misuse_is_an_error_on_every_rank(misuse: Callable[[], None]) -> None:
    for rank, error in enumerate(expect_errors(misuse, 2, group_timeout=10.0, timeout=40.0)):
        missing = [text for text in MISUSE[misuse] if text not in error]
        assert not missing, f"rank {rank} does not say {missing}: {error.type}: {error.message}\n{error.traceback}"


def test_a_strict_boundary_does_not_name_what_it_covers() -> None:
    for error in expect_errors(_strict_boundary_with_a_partial_match, 2):
        assert "mlp" not in error.message.replace("_strict", "")


def _on_another_device() -> None:
    """A matrix on a GPU under a mesh of CPUs; a fake tensor stands for it where there is no GPU."""
    model = GPT()
    with FakeTensorMode():
        model.blocks[0].attn.q.weight = nn.Parameter(torch.empty(10, 10, device="cuda"))
    _core().dedicate_params(model, _mesh(), hidden_matrix)


def test_a_target_on_another_device_than_the_mesh() -> None:
    for error in expect_errors(_on_another_device, 2, group_timeout=10.0, timeout=40.0):
        assert error.type == "ValueError", error.traceback
        assert Q in error and "cuda" in error and "cpu" in error and "move" in error, error.traceback


OPERATIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "matmul": lambda p: torch.ones(3, p.shape[0]) @ p,
    "linear": lambda p: F.linear(torch.ones(3, p.shape[1]), p),
    "transpose": lambda p: p.t(),
    "index": lambda p: p[0],
    "view": lambda p: p.view(-1),
    "flatten": lambda p: p.flatten(),
    "mean_of_rows": lambda p: p.mean(0),
    "softmax": lambda p: p.softmax(0),
    "sort": lambda p: p.sort(),
    "cat": lambda p: torch.cat([p, p]),
    "svd": lambda p: torch.linalg.svd(p),
    "item": lambda p: p.argmax().item(),
}


def _touch(operation: str) -> None:
    model = GPT()
    dedicate(model)
    with torch.no_grad():
        OPERATIONS[operation](model.get_parameter(Q))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_without_meaning_on_a_slice(operation: str) -> None:
    for error in expect_errors(_touch, 2, operation, group_timeout=10.0, timeout=40.0):
        assert "NotImplementedError" in error.mro or "RuntimeError" in error.mro
        assert Q in error and "full_tensor" in error, error.traceback


def _one_rank_skips_a_block() -> None:
    """Without fully_shard, so that it is our groups that have to notice. The user's timeout is ours too."""
    model = MODELS["gpt"]()
    dedicate(model, shard="none")
    if dist.get_rank() == 1:
        model.skip = {1}
    for step in range(2):
        Rows("gpt", step, 0, dist.get_rank(), dist.get_world_size()).loss(model).backward()


def test_a_rank_that_skips_a_block_alone_ends_in_an_error_that_names_it() -> None:
    """The next group's broadcast has the same size and would fit, so sizes do not protect anybody."""
    for error in expect_errors(_one_rank_skips_a_block, 2, group_timeout=4.0, timeout=60.0):
        assert "blocks." in error and "same modules" in error, error.traceback
