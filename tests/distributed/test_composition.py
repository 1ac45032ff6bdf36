"""Every way in which a model uses its blocks, against one process without the library.

Each rank has other rows, and the raw gradients of each step are compared before the optimizer sees them: Newton-Schulz
forgets the scale of a gradient, so weights alone would not show a wrong mean. Tolerances: see reference.py, 1e-6 on
gradients of size 1e-2 to 1, 1e-5 on weights after three steps, 1e-6 on losses. After each step all must be at rest.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.harness import run_distributed
from tests.distributed.models import CONTAINERS, MODELS, batch_for, hidden_matrix, loss_of, plain_name
from tests.distributed.reference import (
    Recipe,
    Rows,
    Training,
    assert_close,
    assert_same_training,
    dedicate,
    full_grads,
    train_dmuon,
    train_reference,
)

CASES: dict[str, Recipe] = {
    # Activation checkpointing: inside and around the block, reentrant or not, by wrapper before or after.
    "ac_inside_nonreentrant": Recipe("inside_nonreentrant"),
    "ac_inside_reentrant": Recipe("inside_reentrant"),
    "ac_outside_nonreentrant": Recipe("outside_nonreentrant"),
    "ac_outside_reentrant": Recipe("outside_reentrant"),
    "ac_wrapper_before_nonreentrant": Recipe(before="checkpoint_wrapper_nonreentrant"),
    "ac_wrapper_before_reentrant": Recipe(before="checkpoint_wrapper_reentrant"),
    "ac_wrapper_after_nonreentrant": Recipe(after="checkpoint_wrapper_nonreentrant"),
    "ac_wrapper_after_reentrant": Recipe(after="checkpoint_wrapper_reentrant"),
    "ac_outside_accumulate": Recipe("outside_nonreentrant", accumulate=2, no_sync="ours"),
    # A block that is called twice, weights and modules that are shared.
    "twice": Recipe("twice"),
    "twice_ac_outside": Recipe("twice_outside_nonreentrant"),
    "twice_ac_inside": Recipe("twice_inside_nonreentrant"),
    "tied_head": Recipe("tied_head"),
    "tied_between_blocks": Recipe("tied_between_blocks"),
    "tied_in_block": Recipe("tied_in_block"),
    "shared_module": Recipe("shared_module"),
    # Several forwards and backwards.
    "two_forwards_two_backwards": Recipe(passes="two_forwards_two_backwards"),
    "two_forwards_reversed_backwards": Recipe(passes="two_forwards_reversed_backwards"),
    "two_forwards_one_backward": Recipe(passes="two_forwards_one_backward"),
    "two_forwards_ac_outside": Recipe("outside_nonreentrant", passes="two_forwards_two_backwards"),
    "retain_graph": Recipe(passes="retain_graph"),
    "no_grad_forwards_in_between": Recipe(passes="eval_in_between"),
    "save_on_cpu": Recipe(passes="save_on_cpu"),
    "skip_a_block_on_all_ranks": Recipe(passes="skip_block"),
    # Accumulation.
    "accumulate_sync_each": Recipe(accumulate=3),
    "accumulate_no_sync": Recipe(accumulate=3, no_sync="ours"),
    "accumulate_fsdp_sync_flag": Recipe(accumulate=3, no_sync="fsdp"),
    "accumulate_no_sync_skip": Recipe(accumulate=2, no_sync="ours", passes="skip_block"),
    "accumulate_no_sync_two_backwards": Recipe(accumulate=2, no_sync="ours", passes="two_forwards_two_backwards"),
    # What goes in and comes out.
    **{f"output_{kind}": Recipe(f"output_{kind}") for kind in CONTAINERS},
    **{f"root_output_{kind}": Recipe(f"root_output_{kind}") for kind in ("dict", "dataclass", "mapping_dataclass")},
    "output_changed_in_place": Recipe("output_in_place"),
    "output_view": Recipe("output_view"),
    # FSDP2's own hook is lost with the view, so only ours is under test.
    "output_view_changed_in_place": Recipe("output_view_in_place", shard="none"),
    "root_boundary_root_output": Recipe("root_output_dataclass", boundary="root"),
    "call_keyword": Recipe("call_keyword"),
    "call_container": Recipe("call_container"),
    "inputs_without_grad": Recipe("float"),
    "inputs_without_grad_no_sync": Recipe("float", accumulate=2, no_sync="ours"),
    "inputs_without_grad_halves": Recipe("float", boundary="halves"),
    # Parameters that get no gradient.
    "frozen_matrices": Recipe("frozen_matrices"),
    "frozen_block": Recipe("frozen_block"),
    "frozen_after_dedication": Recipe(passes="freeze_later"),
    "unused": Recipe("unused"),
    # Boundaries and fully_shard.
    "boundary_halves": Recipe(boundary="halves"),
    "boundary_leaves": Recipe(boundary="leaves"),
    "boundary_root": Recipe(boundary="root"),
    "boundary_halves_ac_outside": Recipe("outside_nonreentrant", boundary="halves"),
    "fully_shard_root_only": Recipe(shard="root"),
    "without_fully_shard": Recipe(shard="none"),
    "fsdp_prefetch": Recipe(after="fsdp_prefetch"),
    "other_entry_than_forward": Recipe("step_gpt", after="register_step", passes="step_method"),
    "other_entry_no_sync": Recipe(
        "step_gpt", after="register_step", passes="step_method", accumulate=2, no_sync="ours"
    ),
    # Other models.
    "conv": Recipe("conv"),
    "sequential": Recipe("sequential", shard="root"),
    "four_layers_clip": Recipe("gpt_four_layers", max_norm=0.2),
}


@functools.cache
def _reference(name: str, split: int = 1) -> Training:
    return train_reference(CASES[name], split)


@pytest.mark.parametrize("zero3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, zero3: bool) -> None:
    recipe = Recipe(**{**vars(CASES[name]), "zero3": zero3})
    assert_same_training(run_distributed(train_dmuon, 2, recipe)[0], _reference(name))


@pytest.mark.parametrize("name", ["ac_outside_nonreentrant", "tied_between_blocks", "inputs_without_grad", "conv"])
def test_equals_one_process_on_four_ranks(name: str) -> None:
    """More ranks than some groups have matrices, and no dimension that four divides."""
    assert_same_training(run_distributed(train_dmuon, 4, CASES[name])[0], _reference(name))


# ------------------------------------------------------------------------------- gradients that not every rank has


@pytest.mark.parametrize("zero3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_experts_that_only_some_ranks_run(zero3: bool, accumulate: int) -> None:
    """Step 0: each rank another expert. Step 1: one expert on both; the other has no gradient and must not move.

    The reference plays two ranks, because which expert runs depends on the rank.
    """
    recipe = Recipe(
        "experts", passes="experts", zero3=zero3, accumulate=accumulate, no_sync="ours" if accumulate > 1 else ""
    )
    reference = train_reference(recipe, split=2)
    have = [{name for name, grad in step.items() if grad is not None} for step in reference.grads]
    assert "blocks.0.experts.1.up.weight" in have[0] and "blocks.0.experts.1.up.weight" not in have[1]
    assert_same_training(run_distributed(train_dmuon, 2, recipe)[0], reference)


def _gradient_holders() -> dict[str, list[Any]]:
    """Shape of the local part of every owned gradient on this rank, None where there is no gradient, and the owner."""
    model = MODELS["experts"]()
    handle = dedicate(model)
    model.expert = dist.get_rank()
    Rows("experts", 0, 0, dist.get_rank(), 2).loss(model).backward()
    both = {p.fqn: [p.owner, tuple(p.rest.grad._local_tensor.shape)] for g in handle.groups for p in g.params}
    model.zero_grad()
    model.expert = 0
    Rows("experts", 0, 0, dist.get_rank(), 2).loss(model).backward()
    none = [p.fqn for g in handle.groups for p in g.params if p.rest.grad is None]
    return {"both": both, "none": none}


def test_a_gradient_is_on_all_ranks_or_on_none() -> None:
    results = run_distributed(_gradient_holders, 2)
    for rank, result in enumerate(results):
        for name, (owner, shape) in result["both"].items():
            full_shape = (9, 6) if "up" in name else (6, 9)
            assert shape == (full_shape if owner == rank else (0, full_shape[1])), name
        assert sorted(result["none"]) == sorted(
            f"blocks.{block}.experts.1.{layer}.weight" for block in range(2) for layer in ("up", "down")
        )


# ------------------------------------------------------------------- bit-exact gradients, mixed precision, autocast


def _local_grads(model: torch.nn.Module, rows: Rows) -> dict[str, Tensor]:
    rows.loss(model).backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def _mean_gradient_against_plain_copies(kind: str, zero3: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Our gradients, and the mean over the ranks of what a plain copy of the model computes on each rank's rows."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    options: dict[str, Any] = {}
    torch.manual_seed(1)
    model, copy = MODELS["gpt"](), MODELS["gpt"]()
    copy.load_state_dict(model.state_dict())
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if kind == "policy":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options = {"mp_policy": policy, "fsdp_options": {"mp_policy": policy}}
        copy = copy.to(torch.bfloat16)
    elif kind == "bfloat16_model":
        model, copy = model.to(torch.bfloat16), copy.to(torch.bfloat16)
    elif kind == "autocast":
        context = torch.autocast("cpu", torch.bfloat16)
    handle = dedicate(model, zero3=zero3, **options)
    rows = Rows("gpt", 0, 0, dist.get_rank(), dist.get_world_size())
    with context:
        ours, plain = rows.loss(model), rows.loss(copy)
    assert torch.equal(ours.detach(), plain.detach()), (ours, plain)
    ours.backward()
    plain.backward()
    for group in handle.groups:
        for param in group.params:
            # Master weight and gradient are float32 whatever the forward computes in.
            assert param.rest.dtype == torch.float32 and param.rest.grad.dtype == torch.float32
    got = {name: grad for name, grad in full_grads(model).items() if grad is not None}
    want = {}
    for name, p in copy.named_parameters():
        assert p.grad is not None
        want[name] = p.grad.float() / dist.get_world_size()
        dist.all_reduce(want[name])
    return got, want


@pytest.mark.parametrize("zero3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("kind", ["float32", "policy", "bfloat16_model", "autocast"])
def test_gradients_are_the_exact_mean_of_the_ranks(kind: str, zero3: bool) -> None:
    """Two ranks: halving is exact and one sum rounds the same in any order, so no tolerance on owned gradients.

    In a bfloat16 model the parameters that FSDP2 manages are reduced in bfloat16 by FSDP2; only ours are compared.
    """
    for got, want in run_distributed(_mean_gradient_against_plain_copies, 2, kind, zero3):
        owned = [name for name, grad in want.items() if grad.ndim == 2 and "blocks." in name]
        assert len(owned) == 18
        assert_close({n: got[n] for n in owned}, {n: want[n] for n in owned}, 0.0, "owned gradients")
        if kind != "bfloat16_model":
            assert_close(got, want, 0.0, "all gradients")


# ------------------------------------------------------------------------------------------------------- torch.compile


COMPILED = {
    "blocks_before_dedication_fullgraph": Recipe("gpt_two_layers", before="compile_blocks_aot"),
    "block_compile_after_fully_shard": Recipe("gpt_two_layers", after="compile_in_place_aot"),
    "whole_model": Recipe("gpt_two_layers", after="compile_model_aot"),
}


@functools.cache
def _two_layers() -> Training:
    return train_reference(Recipe("gpt_two_layers"))


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str) -> None:
    """`aot_eager` traces forward and backward as inductor does and then runs the operators as they are.

    Its decompositions (gelu, layer norm) round differently, by some ulps: ten times the tolerances of eager.
    """
    got = run_distributed(train_dmuon, 2, COMPILED[name], timeout=280)[0]
    assert_same_training(got, _two_layers(), grad_atol=1e-5, weight_atol=1e-4, loss_atol=1e-5)


def _graphs(recipe: Recipe) -> int:
    train_dmuon(recipe)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_compiled_blocks_do_not_recompile() -> None:
    """The block sees the same parameter objects in each step, so its one graph stays valid; Z3 is the hard case."""
    once = Recipe("gpt_two_layers", steps=1, before="compile_blocks_aot")
    more = Recipe("gpt_two_layers", steps=3, before="compile_blocks_aot")
    first, later = run_distributed(_graphs, 2, once, timeout=280), run_distributed(_graphs, 2, more, timeout=280)
    assert first == later and all(count >= 1 for count in first)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor needs a compiler")
@pytest.mark.parametrize("change", ["before", "after_in_place", "after_model"])
def test_compiled_by_inductor(change: str) -> None:
    """Fused kernels reorder sums: the tolerances of `test_compiled`."""
    options = {
        "before": {"before": "compile_blocks_inductor"},
        "after_in_place": {"after": "compile_in_place_inductor"},
        "after_model": {"after": "compile_model_inductor"},
    }[change]
    got = run_distributed(train_dmuon, 2, Recipe("gpt_two_layers", **options), timeout=280)[0]
    assert_same_training(got, _two_layers(), grad_atol=1e-5, weight_atol=1e-4, loss_atol=1e-5)


# ------------------------------------------------------------------------------------------------- graphs kept by users


def _gradient_of_inputs(zero3: bool) -> tuple[Tensor, dict[str, Tensor | None]]:
    """torch.autograd.grad of an input alone, which runs a backward without any parameter's gradient."""
    torch.manual_seed(0)
    model = MODELS["float"]()
    dedicate(model, zero3=zero3)
    inputs, target = batch_for("float", 0, 0, dist.get_rank(), 2)
    inputs = inputs.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(model(inputs), target), inputs)
    Rows("float", 0, 0, dist.get_rank(), 2).loss(model).backward()
    return grad, full_grads(model)


@pytest.mark.parametrize("zero3", [True, False], ids=["z3", "z2"])
def test_gradient_of_an_input_then_a_normal_step(zero3: bool) -> None:
    reference = train_reference(Recipe("float", steps=1))
    for rank, (grad, grads) in enumerate(run_distributed(_gradient_of_inputs, 2, zero3)):
        torch.manual_seed(0)
        model = MODELS["float"]()
        inputs, target = batch_for("float", 0, 0, rank, 2)
        inputs = inputs.clone().requires_grad_()
        (want,) = torch.autograd.grad(loss_of(model(inputs), target), inputs)
        assert_close({"input": grad}, {"input": want}, 1e-6, "gradient of the input")
        assert_close(grads, reference.grads[0], 1e-6, "gradients of the step after")


def _hooks_of_the_user(zero3: bool) -> dict[str, Any]:
    """Forward hooks of a user see the whole weight, and what they return is used."""
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    dedicate(model, zero3=zero3)
    seen: dict[str, Any] = {}

    def look(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
        seen["shape"] = tuple(module.weight.shape)
        seen["type"] = type(module.weight).__name__
        seen["value"] = module.weight.detach().clone()
        return output * 2

    model.blocks[1].mlp.up.register_forward_hook(look)
    Rows("gpt", 0, 0, dist.get_rank(), 2).loss(model).backward()
    return {**seen, "grads": full_grads(model)}


@pytest.mark.parametrize("zero3", [True, False], ids=["z3", "z2"])
def test_a_users_forward_hook_inside_the_block(zero3: bool) -> None:
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    weight = model.blocks[1].mlp.up.weight
    model.blocks[1].mlp.up.register_forward_hook(lambda module, args, output: output * 2)
    Rows("gpt", 0, 0, 0, 1).loss(model).backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    for result in run_distributed(_hooks_of_the_user, 2, zero3):
        assert (result["shape"], result["type"]) == ((17, 10), "Parameter")
        assert torch.equal(result["value"], weight.detach())
        assert_close(result["grads"], want, 1e-6, "gradients")


def _owned_names() -> Iterator[str]:
    for name, p in MODELS["gpt"]().named_parameters():
        if hidden_matrix(name, p):
            yield plain_name(name)


def _parameter_listing(model_name: str) -> dict[str, Any]:
    model = MODELS[model_name]()
    before = [(name, tuple(p.shape), p.numel(), p.requires_grad) for name, p in model.named_parameters()]
    keys = list(model.state_dict())
    handle = dedicate(model)
    return {
        "same": [(name, tuple(p.shape), p.numel(), p.requires_grad) for name, p in model.named_parameters()] == before,
        "same_keys": list(model.state_dict()) == keys,
        "owned": sorted(p.fqn for g in handle.groups for p in g.params),
        "owners": {p.fqn: p.owner for g in handle.groups for p in g.params},
        "tied": model.blocks[0].mlp.up.weight is model.blocks[2].mlp.up.weight,
    }


@pytest.mark.parametrize("model", ["gpt", "tied_between_blocks", "shared_module"])
def test_dedication_keeps_names_shapes_order_and_ties(model: str) -> None:
    first, second = run_distributed(_parameter_listing, 2, model)
    assert first == second and first["same"] and first["same_keys"]
    assert first["tied"] == (model == "tied_between_blocks")
    assert set(first["owners"].values()) == {0, 1}
    if model == "gpt":
        assert first["owned"] == sorted(_owned_names())


def _expanded_buffer() -> torch.Tensor:
    model = MODELS["gpt"]()
    rank = dist.get_rank()
    model.register_buffer("mask", torch.tensor([1.0, 2.0 + rank, 3.0]).expand(4, 3))
    model.register_buffer("column", torch.tensor([[1.0 + rank], [5.0]]).expand(2, 3))
    dedicate(model, shard="none")
    return torch.cat([model.mask, model.column])


def test_buffers_that_repeat_their_elements_become_the_first_ranks() -> None:
    expected = torch.cat([torch.tensor([1.0, 2.0, 3.0]).expand(4, 3), torch.tensor([[1.0], [5.0]]).expand(2, 3)])
    for found in run_distributed(_expanded_buffer, 2):
        assert torch.equal(found, expected)
