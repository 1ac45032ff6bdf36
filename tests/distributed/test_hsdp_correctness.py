"""Training on a (replicate, shard) mesh of four ranks equals training on a 1-D mesh and in one process.

Losses agree to 1e-6, raw gradients to 1e-6 and weights to 1e-5 (see reference.py), and I1-I4 hold after every backward
and every step: `train_dmuon` checks them. Also a script: `torchrun --nproc_per_node=4` of this file.
"""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

if __name__ == "__main__":  # torchrun puts this file's folder on the path, not the repository's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.distributed.checks import Checks
from tests.distributed.counting import CountCollectives
from tests.distributed.harness import run_distributed
from tests.distributed.models import MODELS, hidden_matrix
from tests.distributed.reference import (
    Recipe,
    ReferenceMuon,
    Rows,
    Training,
    assert_at_rest,
    assert_close,
    assert_identical,
    assert_same_training,
    assert_slots_at_rest,
    average_plain_grads,
    dedicate,
    full,
    full_grads,
    full_state,
    full_weights,
    make_muon,
    mean_over_ranks,
    train_dmuon,
    train_reference,
)

STEPS = 20
check = Checks()


def _rows(step: int, model: str = "gpt", micro: int = 0) -> Rows:
    return Rows(model, step, micro, dist.get_rank(), dist.get_world_size())


def _both(recipe: Recipe, split: int = 1) -> None:
    """The recipe on the ranks and in one process."""
    got = train_dmuon(recipe)
    if got is not None:
        assert_same_training(got, train_reference(recipe, split))


# -------------------------------------------------------------------------------------------------------------- layouts


@check.of(
    g2_r2={"replicas": 2, "two_meshes": True, "zero3": True},
    g2_r2_z2={"replicas": 2, "two_meshes": False, "zero3": False},
    g1_r4={"replicas": 4, "two_meshes": True, "zero3": True},
    g1_r4_z2={"replicas": 4, "two_meshes": False, "zero3": False},
    g4_r1={"replicas": 1, "two_meshes": True, "zero3": True},
    g4_r1_z2={"replicas": 1, "two_meshes": False, "zero3": False},
)
def _equals_one_process(replicas: int, two_meshes: bool, zero3: bool) -> None:
    """Twenty steps with default targets, in both forms of the call; and the same as G=4 on a 1-D mesh."""
    recipe = Recipe(
        steps=STEPS, zero3=zero3, default_targets=True, replicas=replicas, two_meshes=two_meshes, max_norm=0.2
    )
    got, flat = train_dmuon(recipe), train_dmuon(Recipe(**{**vars(recipe), "replicas": 0, "two_meshes": False}))
    if got is not None and flat is not None:
        assert len(got.losses) == STEPS
        reference = train_reference(recipe)
        assert all(norm > 0.2 for norm in reference.norms), "nothing was clipped"
        assert_same_training(got, reference)
        assert_same_training(got, flat)


@check.of(g2_r2={"replicas": 2}, g1_r4={"replicas": 4}, g4_r1={"replicas": 1})
def _modes_and_forms_are_bit_identical(replicas: int) -> None:
    """Z2 and Z3, the 2-D mesh in one argument and in two."""
    results = [
        train_dmuon(Recipe(steps=4, zero3=zero3, replicas=replicas, two_meshes=two_meshes))
        for zero3, two_meshes in ((True, False), (True, True), (False, False))
    ]
    if dist.get_rank() == 0:
        for other in results[1:]:
            assert_identical(other, results[0])


@check.of(
    accumulate={"accumulate": 2, "zero3": True},
    accumulate_no_sync={"accumulate": 3, "no_sync": "ours", "zero3": True},
    accumulate_no_sync_z2={"accumulate": 3, "no_sync": "ours", "zero3": False},
    accumulate_fsdp_sync_clip={"accumulate": 2, "no_sync": "fsdp", "zero3": True, "max_norm": 0.2},
    no_fully_shard={"shard": "none", "max_norm": 0.2},
)
def _windows(**options: Any) -> None:
    _both(Recipe(steps=4, replicas=2, **options))


@check.of(
    checkpoint_outside={"model": "outside_nonreentrant"},
    checkpoint_inside_reentrant={"model": "inside_reentrant"},
    checkpoint_inside_z2={"model": "inside_nonreentrant", "zero3": False},
    checkpoint_wrapper={"before": "checkpoint_wrapper_nonreentrant"},
    called_twice={"model": "twice"},
    tied_between_blocks={"model": "tied_between_blocks"},
    tied_in_block={"model": "tied_in_block", "zero3": False},
    shared_module={"model": "shared_module"},
    frozen_matrices={"model": "frozen_matrices"},
    frozen_after_dedication={"passes": "freeze_later"},
    evaluation_in_between={"passes": "eval_in_between", "zero3": False},
    two_forwards={"passes": "two_forwards_reversed_backwards"},
    skipped_blocks={"passes": "skip_block"},
    convolutions={"model": "conv"},
    boundary_halves={"boundary": "halves"},
)
def _composition(**options: Any) -> None:
    _both(Recipe(replicas=2, **options))


@check
def _experts_that_only_some_ranks_run() -> None:
    """A gradient that exists on some ranks of a row, or on one row only, is averaged; one that none has is None."""
    recipe = Recipe("experts", passes="experts", replicas=2)
    _both(recipe, split=4)


# ------------------------------------------------------------------------------------------------------------- clipping


@check.of(two={"norm_type": 2.0}, three={"norm_type": 3.0}, inf={"norm_type": float("inf")})
def _torch_clips_like_we_do(norm_type: float) -> None:
    """torch's clip_grad_norm_ and ours, on owned and sharded gradients together, against one process."""
    import dmuon_core

    plain = MODELS["gpt"]()
    _rows_of_all(0).loss(plain).backward()
    want_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05, norm_type).item()
    want = {name: p.grad for name, p in plain.named_parameters()}
    for clip in (nn.utils.clip_grad_norm_, dmuon_core.clip_grad_norm_):
        torch.manual_seed(0)
        model = MODELS["gpt"]()
        dedicate(model, replicas=2)
        model.load_state_dict(_as_loaded(model, plain))
        _rows(0).loss(model).backward()
        norm = full(clip(model.parameters(), 0.05, norm_type)).item()
        assert abs(norm - want_norm) <= 1e-5 * want_norm, (clip.__module__, norm, want_norm)
        assert_close(full_grads(model), want, 1e-6, f"gradients clipped by {clip.__module__}")
        dmuon_core.check_invariants(model)


def _rows_of_all(step: int, model: str = "gpt") -> Rows:
    return Rows(model, step, 0, 0, 1)


def _as_loaded(model: nn.Module, source: nn.Module) -> dict[str, Any]:
    """The weights of plain ``source`` in the placement of ``model``."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    import dmuon_core

    state = {}
    for name, p in model.named_parameters():
        value = source.get_parameter(name).detach()
        if isinstance(p, DTensor) and not isinstance(p, dmuon_core.OwnedTensor):
            value = distribute_tensor(value, p.device_mesh, p.placements)
        state[name] = value
    return state


# --------------------------------------------------------------------------------------------------------------- counts


class _CountBytes(CountCollectives):
    """Bytes that this rank really hands to collectives of our process groups, by the group's name."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("c10d::broadcast_", "c10d::reduce_"):
            group = dist.ProcessGroup.unbox(args[1]).group_desc
            self.bytes[group] = self.bytes.get(group, 0) + sum(t.numel() * t.itemsize for t in args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


def _train_one_window(model: nn.Module, step: int, accumulate: int) -> None:
    import contextlib

    import dmuon_core

    for micro in range(accumulate):
        hold = micro + 1 < accumulate
        with dmuon_core.no_sync(model) if hold else contextlib.nullcontext():
            _rows(step, "gpt_four_layers", micro).loss(model).backward()


@check.of(
    g2_r2={"replicas": 2, "accumulate": 1},
    g1_r4={"replicas": 4, "accumulate": 1},
    g4_r1={"replicas": 1, "accumulate": 1},
    window_of_three={"replicas": 2, "accumulate": 3},
    bfloat16={"replicas": 2, "accumulate": 1, "low": True},
)
def _bytes_follow_the_formula(replicas: int, accumulate: int, low: bool = False) -> None:
    """Exact payload of one optimizer step on an R x G mesh.

    P is the number of elements of all owned matrices, P_s of those whose owner is in shard column s; b is the element
    size of ``reduce_dtype``, w that of the weights at rest. On a rank of column s, whatever the length of the window:

    * reduce along the row: P * b bytes (everybody contributes to every matrix),
    * reduce along the column: P_s * b bytes (the row's sums are there), nothing if R = 1,
    * publish: P_s * w bytes, nothing if R = 1.

    Over all G * R ranks that is G * R * P * b, R * P * b and R * P * w. Collectives: one per group of the model and
    owner (r, s) each, and each carries TAG_NUMEL more elements.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from dmuon_core.comm import TAG_NUMEL

    b, w = (2, 4) if low else (4, 4)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16) if low else None
    model = MODELS["gpt_four_layers"]()
    handle = dedicate(model, replicas=replicas, mp_policy=policy, fsdp_options={"mp_policy": policy} if policy else {})
    optimizer = make_muon(model)
    for step in range(2):
        _train_one_window(model, step, accumulate)
        optimizer.step()
        optimizer.zero_grad()
        handle.stats.reset()
    with _CountBytes() as counted:
        _train_one_window(model, 2, accumulate)
        optimizer.step()
    stats = handle.stats

    column = dist.get_rank() % (dist.get_world_size() // replicas)
    elements = sum(p.shape.numel() for p in handle.params)
    mine = sum(p.shape.numel() for p in handle.params if p.owner == column) if replicas > 1 else 0
    owners = [{(p.owner_replicate, p.owner) for p in group.params} for group in handle.groups]
    buffers = sum(len(found) for found in owners)
    column_buffers = sum(s == column for found in owners for _, s in found) if replicas > 1 else 0
    assert elements == 4 * (4 * 100 + 2 * 170)
    assert (stats.reduces, stats.reduce_bytes) == (buffers, elements * b)
    assert (stats.replicate_reduces, stats.replicate_reduce_bytes) == (column_buffers, mine * b)
    assert (stats.publishes, stats.publish_bytes) == (column_buffers, mine * w)
    assert stats.flag_reduces == 1
    on_the_wire = {
        "dmuon_reduce": (elements + buffers * TAG_NUMEL) * b,
        "dmuon_replicate_reduce": (mine + column_buffers * TAG_NUMEL) * b,
        "dmuon_publish": (mine + column_buffers * TAG_NUMEL) * w,
    }
    for group, size in on_the_wire.items():
        assert counted.bytes.get(group, 0) == size, (group, counted.bytes, size)
    totals: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(totals, (stats.reduce_bytes, stats.replicate_reduce_bytes, stats.publish_bytes))
    expected = (
        4 * elements * b,
        replicas * elements * b * (replicas > 1),
        replicas * elements * w * (replicas > 1),
    )
    assert tuple(map(sum, zip(*totals, strict=True))) == expected


@check
def _without_no_sync_each_backward_reduces_in_both_stages() -> None:
    """The counterpart of window_of_three above, so that counts are shown to depend on the window."""
    model = MODELS["gpt"]()
    handle = dedicate(model, replicas=2)
    counts = []
    for step in range(3):
        handle.stats.reset()
        for micro in range(1 + step):
            _rows(step, "gpt", micro).loss(model).backward()
        counts.append((handle.stats.reduce_bytes, handle.stats.replicate_reduce_bytes, handle.stats.flag_reduces))
    assert counts == [tuple(times * count for count in counts[0]) for times in (1, 2, 3)]
    assert all(counts[0])


# ----------------------------------------------------------------------------------------- optimizers that are not ours


def _stock(name: str, params: Any) -> torch.optim.Optimizer:
    makers = {
        "sgd": lambda: torch.optim.SGD(params, lr=0.1),
        "sgd_momentum": lambda: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        "adamw": lambda: torch.optim.AdamW(params, lr=3e-3, eps=1e-4),
        "adamw_foreach": lambda: torch.optim.AdamW(params, lr=3e-3, eps=1e-4, foreach=True, amsgrad=True),
    }
    return makers[name]()


@check.of(**{name: {"name": name} for name in ("sgd", "sgd_momentum", "adamw", "adamw_foreach")})
def _stock_optimizer_on_owned_parameters(name: str) -> None:
    """torch.optim on everything; its state for owned matrices has rows on the home only, and survives a checkpoint."""
    import dmuon_core

    torch.manual_seed(0)
    model, plain = MODELS["gpt"](), MODELS["gpt"]()
    plain.load_state_dict(model.state_dict())
    handle = dedicate(model, replicas=2)
    ours, stock = _stock(name, model.parameters()), _stock(name, plain.parameters())
    for step in range(4):
        got, want = _rows(step).loss(model), _rows_of_all(step).loss(plain)
        got.backward()
        want.backward()
        assert abs(mean_over_ranks(got.item()) - want.item()) <= 1e-6
        for optimizer in (ours, stock):
            optimizer.step()
            optimizer.zero_grad()
        dmuon_core.check_invariants(model)
    assert_close(full_weights(model), dict(plain.named_parameters()), 1e-5, "weights")
    names = {p: n for n, p in plain.named_parameters()}
    want_state = {
        f"{names[p]}/{key}": value
        for p, entry in stock.state.items()
        for key, value in entry.items()
        if isinstance(value, Tensor)
    }
    got_state = full_state(model, ours)
    if want_state:
        assert_close(got_state, want_state, 1e-5, "optimizer state")
    else:
        assert not got_state
    _assert_state_at_home(handle, ours)
    saved = get_optimizer_state_dict(model, ours, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        for fqn, entry in saved["state"].items():
            for key, value in entry.items():
                if isinstance(value, Tensor) and f"{fqn}/{key}" in got_state:
                    assert torch.equal(value, got_state[f"{fqn}/{key}"]), (fqn, key)


def _assert_state_at_home(handle: Any, optimizer: torch.optim.Optimizer) -> None:
    for param in handle.params:
        for key, value in optimizer.state.get(param.rest, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0:
                rows = param.shape[0] if param.is_owner else 0
                assert tuple(value._local_tensor.shape) == (rows, *param.shape[1:]), (param.fqn, key)
                assert value.owner == param.owned.home, (param.fqn, key)


@check
def _an_update_written_by_hand() -> None:
    """`p -= lr * p.grad` without any optimizer: only the owner has the gradient, so the next forward must publish."""
    import dmuon_core

    torch.manual_seed(0)
    model, plain = MODELS["gpt"](), MODELS["gpt"]()
    plain.load_state_dict(model.state_dict())
    dedicate(model, replicas=2)
    for step in range(3):
        got, want = _rows(step).loss(model), _rows_of_all(step).loss(plain)
        got.backward()
        want.backward()
        assert abs(mean_over_ranks(got.item()) - want.item()) <= 1e-6, step
        for part in (model, plain):
            for index, p in enumerate(part.parameters()):
                if index % 2:
                    p.data.sub_(p.grad, alpha=0.1)
                else:
                    with torch.no_grad():
                        p -= 0.1 * p.grad
                p.grad = None
    dmuon_core.check_invariants(model)
    assert_close(full_weights(model), dict(plain.named_parameters()), 1e-5, "weights")


# ------------------------------------------------------------------------------------------------------ initial weights


def _is_owned(p: Tensor) -> bool:
    import dmuon_core

    return isinstance(p, dmuon_core.OwnedTensor)


@check.of(g2_r2={"replicas": 2}, g1_r4={"replicas": 4})
def _rank_0_wins_over_different_initial_weights(replicas: int) -> None:
    import dmuon_core

    torch.manual_seed(100 + dist.get_rank())
    model = MODELS["gpt"]()
    dedicate(model, replicas=replicas)
    dmuon_core.check_invariants(model)
    torch.manual_seed(100)
    assert_close(full_weights(model), dict(MODELS["gpt"]().named_parameters()), 0.0, "weights")


@check.of(check_first={"check_first": True}, forward_first={"check_first": False})
def _without_sync_the_owner_wins(check_first: bool) -> None:
    """Different initial weights and sync_module_states=False: replicas take their owner's."""
    import dmuon_core

    torch.manual_seed(100 + dist.get_rank())
    model = MODELS["gpt"]()
    mine = {name: p.detach().clone() for name, p in model.named_parameters()}
    handle = dedicate(model, replicas=2, shard="none", sync_module_states=False)
    if not check_first:
        _rows(0).loss(model)
    dmuon_core.check_invariants(model)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for param in handle.params:
        owner = param.owner_replicate * 2 + param.owner
        assert torch.equal(full(param.rest), everyone[owner][param.fqn]), param.fqn


@check.of(check_first={"check_first": True}, forward_first={"check_first": False})
def _meta_device_and_different_seeds(check_first: bool) -> None:
    """Built on meta, materialized and initialized on each rank with another seed; then trained."""
    import dmuon_core

    with torch.device("meta"):
        model = MODELS["float"]()
    handle = dedicate(model, replicas=2, shard="none")
    dmuon_core.check_invariants(model)
    model.to_empty(device="cpu")
    torch.manual_seed(7)
    for module in model.modules():  # what is no matrix must be equal: nobody makes it so
        for p in module.parameters(recurse=False):
            if not _is_owned(p):
                nn.init.normal_(p, std=0.3)
    torch.manual_seed(100 + dist.get_rank())
    for param in handle.params:
        nn.init.normal_(param.rest, std=0.3)
    if check_first:
        dmuon_core.check_invariants(model)
    _train_on_and_compare(model, handle, "float")


def _train_on_and_compare(model: nn.Module, handle: Any, name: str) -> None:
    """Three steps from the weights that the first forward sees, here and in one process."""
    import dmuon_core

    got = Training()
    optimizer = make_muon(model)
    plain = MODELS[name]()
    for step in range(3):
        loss = _rows(step, name).loss(model)
        if step == 0:
            plain.load_state_dict(full_weights(model))
        loss.backward()
        average_plain_grads(model)
        got.losses.append(mean_over_ranks(loss.item()))
        optimizer.step()
        dmuon_core.check_invariants(model)
        optimizer.zero_grad()
        assert_at_rest(handle)
    reference, want = ReferenceMuon(plain), []
    for step in range(3):
        loss = _rows_of_all(step, name).loss(plain)
        loss.backward()
        want.append(loss.item())
        reference.step()
        plain.zero_grad()
    assert max(abs(a - b) for a, b in zip(got.losses, want, strict=True)) <= 1e-6
    assert_close(full_weights(model), dict(plain.named_parameters()), 1e-5, "weights")


@check
def _initialized_again_in_training() -> None:
    """A matrix that is drawn anew on every rank, with generators that differ."""
    import dmuon_core

    model = MODELS["float"]()
    handle = dedicate(model, replicas=2, shard="none")
    _rows(0, "float").loss(model).backward()
    model.zero_grad()
    torch.manual_seed(dist.get_rank())
    nn.init.xavier_uniform_(model.blocks[1].mlp.up.weight)
    nn.init.normal_(model.blocks[2].mlp.up.weight.data)
    _train_on_and_compare(model, handle, "float")
    dmuon_core.check_invariants(model)


# --------------------------------------------------------------------------------------------- more slots than matrices


def _three_matrices(name: str, p: nn.Parameter) -> bool:
    return name.endswith("mlp.up.weight")


@check
def _more_ranks_than_matrices() -> None:
    """Four ranks, three matrices: one rank owns nothing, and rank 0 says so once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import dmuon_core

    torch.manual_seed(0)
    model, plain = MODELS["gpt"](), MODELS["gpt"]()
    plain.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = dmuon_core.dedicate_params(model, mesh, _three_matrices)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        stock = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            got, want = _rows(step).loss(model), _rows_of_all(step).loss(plain)
            got.backward()
            want.backward()
            assert abs(mean_over_ranks(got.item()) - want.item()) <= 1e-6
            for each in (optimizer, stock):
                each.step()
                each.zero_grad()
            dmuon_core.check_invariants(model)
    assert_close(full_weights(model), dict(plain.named_parameters()), 1e-5, "weights")
    assert len(handle.assignment.idle_slots) == 1
    said = [str(one.message) for one in caught if "own no matrix" in str(one.message)]
    assert len(said) == (dist.get_rank() == 0), said
    assert all("1 of 4 ranks" in line and "only 3" in line for line in said)


def test_eight_slots_and_three_matrices() -> None:
    from dmuon_core.partition import MatrixSpec, compute_balanced_assignment

    specs = [MatrixSpec(f"blocks.{i}.w", (8, 8), f"blocks.{i}") for i in range(3)]
    assignment = compute_balanced_assignment(specs, 8, shard_size=4)
    assert len(set(assignment.slots)) == 3
    assert len(assignment.idle_slots) == 5
    assert "5 idle" in str(assignment)


# ---------------------------------------------------------------------------------------------------- optimizer's state


@check.of(full={"whole": True}, sharded={"whole": False})
def _optimizer_state_through_a_checkpoint(whole: bool) -> None:
    """get_ and set_optimizer_state_dict in both forms: momentum stays on the home, and training goes on the same."""
    import dmuon_core

    options = StateDictOptions(full_state_dict=whole, cpu_offload=whole)
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    handle = dedicate(model, replicas=2)
    optimizer = make_muon(model)
    for step in range(2):
        _rows(step).loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    before, weights = full_state(model, optimizer), full_weights(model)
    if whole:
        # Only rank 0 gets it; the others load what it broadcasts.
        assert bool(saved) == (dist.get_rank() == 0)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    torch.manual_seed(5)
    other = MODELS["gpt"]()
    other_handle = dedicate(other, replicas=2, zero3=False)
    fresh = make_muon(other)
    set_optimizer_state_dict(other, fresh, saved, options=options)
    after = full_state(other, fresh)
    assert after.keys() == before.keys()
    assert_close(after, before, 0.0, "optimizer state")
    _assert_state_at_home(handle, optimizer)
    _assert_state_at_home(other_handle, fresh)
    dmuon_core.check_invariants(other)

    plain = MODELS["gpt"]()
    plain.load_state_dict(weights)
    other.load_state_dict(_as_loaded(other, plain))
    for part, its in ((model, optimizer), (other, fresh)):
        _rows(2).loss(part).backward()
        its.step()
    assert_close(full_weights(other), full_weights(model), 0.0, "weights of the step after")


# ----------------------------------------------------------------------------------------------------------- exceptions


class _Bomb(Exception):
    pass


def _explode(*_: Any) -> None:
    raise _Bomb


@check.of(
    **{f"{where}{'' if zero3 else '_z2'}": {"where": where, "zero3": zero3} for where in ("forward", "backward")
       for zero3 in (True, False)}
)  # fmt: skip
def _a_step_that_raises(where: str, zero3: bool) -> None:
    """On all ranks, right after a step whose weights are still on their way; later steps are as if it had not been."""
    import dmuon_core

    def explode(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(_explode) if where == "backward" else _explode()

    torch.manual_seed(0)
    model, plain = MODELS["gpt"](), MODELS["gpt"]()
    plain.load_state_dict(model.state_dict())
    handle = dedicate(model, replicas=2, zero3=zero3)
    optimizer, reference = make_muon(model), ReferenceMuon(plain)
    for step in range(4):
        if step == 2:
            removable = model.blocks[1].mlp.up.register_forward_hook(explode)
            with pytest.raises(_Bomb):
                _rows(7).loss(model).backward()
            removable.remove()
            optimizer.zero_grad()
            dmuon_core.check_invariants(model)
        got, want = _rows(step).loss(model), _rows_of_all(step).loss(plain)
        got.backward()
        want.backward()
        assert abs(mean_over_ranks(got.item()) - want.item()) <= 1e-6, step
        assert_close(full_grads(model), {n: p.grad for n, p in plain.named_parameters()}, 1e-6, "gradients")
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        plain.zero_grad()
        dmuon_core.check_invariants(model)
        assert_at_rest(handle)
        assert_slots_at_rest(model, handle)
    assert_close(full_weights(model), dict(plain.named_parameters()), 1e-5, "weights")


# ------------------------------------------------------------------------------------------ the checker itself, misused


def _trained(replicas: int = 2) -> tuple[nn.Module, Any, Any]:
    model = MODELS["float"]()
    handle = dedicate(model, replicas=replicas, shard="none")
    optimizer = make_muon(model)
    _rows(0, "float").loss(model).backward()
    average_plain_grads(model)
    return model, handle, optimizer


def _refused(model: nn.Module, *words: str) -> None:
    """On every rank, with these words in the message."""
    import dmuon_core

    with pytest.raises(RuntimeError) as caught:
        dmuon_core.check_invariants(model)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def _on(rank: int) -> bool:
    return dist.get_rank() == rank


def _home_rank(param: Any) -> int:
    return param.owner_replicate * 2 + param.owner


def _replica_rank(param: Any) -> int:
    return (1 - param.owner_replicate) * 2 + param.owner


def _rank_without(param: Any) -> int:
    return param.owner_replicate * 2 + 1 - param.owner


@check
def _the_checker_accepts_what_is_right() -> None:
    import dmuon_core

    model, _, optimizer = _trained()
    for _ in range(2):
        dmuon_core.check_invariants(model)  # with gradients
    optimizer.step()
    dmuon_core.check_invariants(model)  # with a publication on its way
    with torch.no_grad():
        _rows(1, "float").loss(model)
    loss = _rows(1, "float").loss(model)
    dmuon_core.check_invariants(model)  # between forward and backward
    with dmuon_core.no_sync(model):
        loss.backward()
    dmuon_core.check_invariants(model)  # in an open window
    flat, _, _ = _trained(replicas=0)
    dmuon_core.check_invariants(flat)


@check
def _i1_two_owners() -> None:
    model, handle, _ = _trained()
    param = handle.params[0]
    rank = _replica_rank(param)
    if _on(rank):
        param.owned._home = (1 - param.owner_replicate, param.owner)
    _refused(model, "I1", f"'{param.fqn}'", f"rank {rank}", "dedicate_params")


@check
def _i2_a_rank_too_few_and_a_rank_too_many() -> None:
    for where in (_home_rank, _replica_rank, _rank_without):
        model, handle, _ = _trained()
        param = handle.params[1]
        rank = where(param)
        if _on(rank):
            shape = tuple(param.shape) if where is _rank_without else (0, *param.shape[1:])
            param.owned._local_tensor = torch.zeros(shape)
        _refused(model, "I2", f"'{param.fqn}'", f"rank {rank}", "load_state_dict")


@check
def _i3_gradients_where_they_do_not_belong() -> None:
    for where in (_replica_rank, _rank_without):
        model, handle, _ = _trained()
        param = handle.params[2]
        if _on(where(param)):
            param.rest.grad._local_tensor = torch.zeros(param.shape)
        _refused(model, "I3", f"'{param.fqn}'", f"rank {where(param)}", "zero_grad")
    model, handle, _ = _trained()
    param = handle.params[3]
    if _on(3):
        param.rest.grad = None
    _refused(model, "I3", f"'{param.fqn}'", "[0, 1, 2]", "[3]", "zero_grad")


@check
def _i4_replicas_that_differ() -> None:
    model, handle, optimizer = _trained()
    optimizer.step()
    param = handle.params[4]
    if _on(_replica_rank(param)):
        with torch.no_grad():
            param.rest.view_as(param.rest).mul_(1.0000002)  # one bit of some elements
    _refused(
        model, "I4", f"'{param.fqn}'", f"[{_replica_rank(param)}]", f"rank {_home_rank(param)}", "every rank alike"
    )


@check
def _i4_drawn_anew_on_one_rank_only() -> None:
    """A rank that knows of a change alone is an error here, not a hang."""
    model, handle, optimizer = _trained()
    optimizer.step()
    param = handle.params[4]
    if _on(_replica_rank(param)):
        nn.init.normal_(param.rest)
    _refused(model, "I4", f"'{param.fqn}'", f"[{_replica_rank(param)}]")


@check
def _inside_a_forward_or_backward() -> None:
    import dmuon_core

    model, _, _ = _trained()

    def inside(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="inside a forward or backward"):
            dmuon_core.check_invariants(model)

    model.blocks[0].register_forward_hook(lambda module, args, output: (inside(), output.register_hook(inside))[0])
    _rows(1, "float").loss(model).backward()
    with pytest.raises(ValueError, match="call dedicate_params"):
        dmuon_core.check_invariants(nn.Linear(2, 2))


# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", check.slow_but("equals_one_process-g2_r2", "windows-accumulate"))
def test_on_four_ranks(name: str) -> None:
    run_distributed(check.run, 4, name)


def test_the_comparison_would_notice_a_rank_that_is_left_out() -> None:
    """Gradients of three of the four ranks' rows are far from those of all: a lost contribution cannot pass."""
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    whole = train_reference(Recipe(steps=1)).grads[0]
    for rank in range(3):
        (Rows("gpt", 0, 0, rank, 4).loss(model) / 3).backward()
    for name, p in model.named_parameters():
        if hidden_matrix(name, p):
            assert (p.grad - whole[name]).abs().max() > 1e-4, name


if __name__ == "__main__":
    check.run_as_script()
