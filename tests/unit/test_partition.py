"""The partition: owners stated for small cases, rules for generated ones."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon_core.partition import MatrixSpec, compute_balanced_assignment, newton_schulz_flops


def specs_of(layers: int, shapes: dict[str, tuple[int, ...]]) -> list[MatrixSpec]:
    return [
        MatrixSpec(f"layers.{i}.{name}", shape, f"layers.{i}") for i in range(layers) for name, shape in shapes.items()
    ]


def test_cost_is_that_of_the_iterations_on_the_flattened_matrix() -> None:
    # One step on [2, 3]: X X^T 24, A A 16, B X 24.
    assert newton_schulz_flops((2, 3), steps=1) == 24 + 16 + 24
    assert newton_schulz_flops((3, 2), steps=1) == newton_schulz_flops((2, 3), steps=1)
    assert newton_schulz_flops((2, 3)) == 5 * 64
    assert newton_schulz_flops((8, 4, 3, 3)) == newton_schulz_flops((8, 36))
    assert newton_schulz_flops((0, 4)) == 0


def test_owners_of_one_transformer_layer_on_four_slots() -> None:
    layer = specs_of(1, {"q": (4, 4), "k": (2, 4), "v": (2, 4), "up": (16, 4), "down": (4, 16)})
    result = compute_balanced_assignment(layer, 4)
    # Costliest first, ties by name: down, up, q, k each take a slot that the layer does not use yet; then v
    # goes to the least loaded slot, the one of k.
    assert dict(result.owners) == {
        "layers.0.down": 0,
        "layers.0.up": 1,
        "layers.0.q": 2,
        "layers.0.k": 3,
        "layers.0.v": 3,
    }
    wide, square, small = (newton_schulz_flops(shape) for shape in ((4, 16), (4, 4), (2, 4)))
    assert result.loads == (wide, wide, square, 2 * small)
    assert result.lower_bound == wide
    assert result.ratio == 1.0
    assert result.idle_slots == ()


def test_layers_spread_before_loads_balance() -> None:
    # By load alone both small matrices of layer b would go to slot 1, beside the large one of layer a.
    specs = [MatrixSpec("a.w", (8, 8), "a"), MatrixSpec("b.u", (2, 2), "b"), MatrixSpec("b.v", (2, 2), "b")]
    result = compute_balanced_assignment(specs, 2)
    assert dict(result.owners) == {"a.w": 0, "b.u": 1, "b.v": 0}


def test_equal_layers_alternate_between_two_slots() -> None:
    result = compute_balanced_assignment(specs_of(2, {"up": (8, 4), "down": (4, 8)}), 2)
    assert dict(result.owners) == {
        "layers.0.down": 0,
        "layers.0.up": 1,
        "layers.1.down": 0,
        "layers.1.up": 1,
    }
    assert result.ratio == 1.0


def test_more_slots_than_matrices_leaves_idle_ones() -> None:
    result = compute_balanced_assignment(specs_of(1, {"a": (4, 4), "b": (2, 2)}), 4)
    assert dict(result.owners) == {"layers.0.a": 0, "layers.0.b": 1}
    assert result.idle_slots == (2, 3)


def test_nothing_to_assign() -> None:
    result = compute_balanced_assignment([], 3)
    assert dict(result.owners) == {}
    assert (result.loads, result.lower_bound, result.ratio) == ((0, 0, 0), 0.0, 1.0)
    assert result.idle_slots == (0, 1, 2)
    assert "0 matrices on 3 slots" in str(result)


def test_digest_is_a_fixed_function_of_the_assignment() -> None:
    specs = specs_of(2, {"up": (8, 4), "down": (4, 8)})
    digest = compute_balanced_assignment(specs, 2).digest()
    assert digest == "a99a3238f21816199c20881b40a07faa351e0ce8940e8ed1d4d79ddc6c59cac0"
    others = [
        compute_balanced_assignment(specs, 3),
        compute_balanced_assignment(specs, 2, ns_steps=4),
        compute_balanced_assignment(specs[:-1], 2),
        compute_balanced_assignment([*specs[:-1], MatrixSpec("x", (4, 8), "layers.1")], 2),
        compute_balanced_assignment([*specs[:-1], MatrixSpec(specs[-1].fqn, (4, 8), "other")], 2),
    ]
    assert len({digest, *(other.digest() for other in others)}) == 6


def test_result_is_read_only_and_survives_copies() -> None:
    result = compute_balanced_assignment(specs_of(2, {"up": (8, 4), "down": (4, 8)}), 2)
    with pytest.raises(TypeError):
        result.owners["layers.0.up"] = 0  # type: ignore[index]
    with pytest.raises(AttributeError):
        result.num_slots = 3  # type: ignore[misc]
    for other in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert other == result
        assert other.owners == result.owners


def test_table_shows_every_slot_or_says_how_many_it_leaves_out() -> None:
    text = str(compute_balanced_assignment(specs_of(2, {"up": (8, 4), "down": (4, 8)}), 2))
    assert text.splitlines()[0] == "4 matrices on 2 slots (0 idle), busiest / lower bound = 1.000"
    assert len(text.splitlines()) == 4
    many = str(compute_balanced_assignment(specs_of(2, {"up": (8, 4)}), 100))
    assert "84 more slots" in many
    assert len(many.splitlines()) == 19


@pytest.mark.parametrize(
    ("specs", "arguments", "message"),
    [
        ([MatrixSpec("w", (2, 2), "l")] * 2, {"num_slots": 1}, "'w' occurs twice"),
        ([], {"num_slots": 0}, "num_slots must be at least 1, got 0"),
        ([], {"num_slots": 1, "ns_steps": 0}, "ns_steps must be at least 1, got 0"),
    ],
)
def test_bad_input_is_refused(specs: list[MatrixSpec], arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_balanced_assignment(specs, **arguments)


def test_vector_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'norm\.weight' has shape \(4,\).*AdamW"):
        MatrixSpec("norm.weight", (4,), "norm")


def test_partition_needs_no_torch() -> None:
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('partition', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['partition'] = module\n"
        "spec.loader.exec_module(module)\n"
        "module.compute_balanced_assignment([module.MatrixSpec('w', (2, 2), 'l')], 2).digest()\n"
        "assert 'torch' not in sys.modules\n"
    )
    path = sys.modules[compute_balanced_assignment.__module__].__file__
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)


@st.composite
def models(draw: st.DrawFn) -> list[MatrixSpec]:
    sizes = st.integers(min_value=1, max_value=64)
    shapes = draw(st.lists(st.lists(sizes, min_size=2, max_size=4).map(tuple), min_size=0, max_size=40))
    layers = draw(st.lists(st.sampled_from("abcde"), min_size=len(shapes), max_size=len(shapes)))
    rows = enumerate(zip(layers, shapes, strict=True))
    return [MatrixSpec(f"{layer}.{i}", shape, layer) for i, (layer, shape) in rows]


slots = st.integers(min_value=1, max_value=12)


@given(models(), slots)
@settings(deadline=None)
def test_every_matrix_has_one_owner_and_loads_add_up(specs: list[MatrixSpec], num_slots: int) -> None:
    result = compute_balanced_assignment(specs, num_slots)
    assert set(result.owners) == {spec.fqn for spec in specs}
    loads = [0] * num_slots
    for spec in specs:
        loads[result.owners[spec.fqn]] += newton_schulz_flops(spec.shape)
    assert result.loads == tuple(loads)
    assert set(result.idle_slots) == set(range(num_slots)) - set(result.owners.values())


@given(models(), slots)
@settings(deadline=None)
def test_a_layer_sits_on_as_many_slots_as_possible(specs: list[MatrixSpec], num_slots: int) -> None:
    result = compute_balanced_assignment(specs, num_slots)
    by_layer: dict[str, list[int]] = defaultdict(list)
    for spec in specs:
        by_layer[spec.layer].append(result.owners[spec.fqn])
    for owners in by_layer.values():
        assert len(set(owners)) == min(len(owners), num_slots)


@given(models(), slots, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_input_order_does_not_matter(specs: list[MatrixSpec], num_slots: int, random: object) -> None:
    shuffled = list(specs)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first, second = (compute_balanced_assignment(s, num_slots) for s in (specs, shuffled))
    assert first == second
    assert first.digest() == second.digest()
    assert list(first.owners) == list(second.owners)


@given(models(), slots)
@settings(deadline=None)
def test_ratio_is_never_below_one(specs: list[MatrixSpec], num_slots: int) -> None:
    result = compute_balanced_assignment(specs, num_slots)
    assert result.ratio >= 1.0
    assert max(result.loads) <= sum(result.loads)


@given(models(), slots)
@settings(deadline=None)
def test_bound_of_list_scheduling_holds_without_layers(specs: list[MatrixSpec], num_slots: int) -> None:
    alone = [MatrixSpec(spec.fqn, spec.shape, spec.fqn) for spec in specs]
    result = compute_balanced_assignment(alone, num_slots)
    # Graham, 1969: list scheduling gives the busiest slot at most mean + (1 - 1/slots) * largest.
    largest = max(result.costs, default=0)
    assert max(result.loads) * num_slots <= sum(result.loads) + (num_slots - 1) * largest


def test_hundred_thousand_matrices() -> None:
    shapes = {f"expert{i}.{name}": (2048, 768) for i in range(128) for name in ("gate", "up", "down")}
    result = compute_balanced_assignment(specs_of(260, shapes), 1024)
    assert len(result.owners) == 99840
    assert result.ratio <= 1.02
