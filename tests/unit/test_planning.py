"""Planning: memory and times that can be computed by hand, the choice of a layout, the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from planning_models import BLOCKS, MATRIX, VOCAB, WIDTH, Net, NoBlocks

from dmuon_core import NewtonSchulzFlops
from dmuon_core.assignment import MatrixSpec
from dmuon_core.planning.cli import main
from dmuon_core.planning.hardware import Hardware
from dmuon_core.planning.layout import Layout, Placed, place
from dmuon_core.planning.memory import memories, memory
from dmuon_core.planning.recommend import Limits, evaluate, layouts, recommend
from dmuon_core.planning.shapes import ROOT, ModelShapes, Weight, shapes_of
from dmuon_core.planning.shapes_file import read_shapes
from dmuon_core.planning.timing import ADAM_PASSES, MUON_PASSES, Work, step_times
from dmuon_core.planning.traffic import Kind, Phase, total, transfers

HERE = "planning_models"
FAST = Hardware(1e9, 1e9, ((1.0, 1e9),), ((1.0, 2e9),), latency=0.0)


# --------------------------------------------------------------------------------------------- memory, traffic, time


def test_memory_of_one_rank_by_formula() -> None:
    found = memory(place(shapes_of(Net()), Layout(1)), 0)
    owned, rest = 2 * BLOCKS * MATRIX * 4, 2 * VOCAB * WIDTH * 4
    assert (found.owned_weights, found.momentum, found.sharded_weights) == (owned, owned, rest)
    assert found.adam == 2 * rest + 2 * 4
    assert found.unsharded == 2 * (2 * MATRIX + 4) * 4  # two blocks, each one buffer that ends in a tag
    assert memory(place(shapes_of(Net()), Layout(1, 1, False)), 0).unsharded == BLOCKS * (2 * MATRIX + 4) * 4


def test_time_of_one_rank_is_compute_and_update() -> None:
    memory_rate = 1e9
    times = step_times(place(shapes_of(Net()), Layout(1)), replace(FAST, memory=memory_rate), Work(tokens=10))
    products = 2 * 10 * (2 * BLOCKS * MATRIX + VOCAB * WIDTH)
    # Packing copies go through memory even where nothing is sent.
    assert math.isclose(times.compute, 3 * products / 1e9)
    assert times.forward + times.backward == pytest.approx(times.compute)
    newton_schulz = 2 * BLOCKS * 5 * 6 * WIDTH**3 / 2e9
    elementwise = (MUON_PASSES * 2 * BLOCKS * MATRIX + ADAM_PASSES * 2 * VOCAB * WIDTH) * 4 / memory_rate
    assert times.optimizer == pytest.approx(newton_schulz + elementwise)
    assert times.publish == times.exposed_publish == 0
    assert times.hides is None


def test_without_overlap_everything_adds_up() -> None:
    placed = place(shapes_of(Net()), Layout(2))
    work = Work(tokens=10)
    serial = step_times(placed, replace(FAST, overlap=0.0), work)
    assert serial.forward + serial.backward == pytest.approx(serial.compute + serial.communication)
    found = transfers(placed, 0)
    ours = total(found, Kind.BROADCAST) + total(found, Kind.REDUCE)
    theirs = (total(found, Kind.ALL_GATHER) + total(found, Kind.REDUCE_SCATTER)) / 2
    flags = total(found, Kind.FLAGS)
    assert serial.communication == pytest.approx((ours + theirs + flags) / 1e9)


def test_communication_hides_behind_enough_compute() -> None:
    placed = place(shapes_of(Net()), Layout(2))
    long = step_times(placed, FAST, Work(tokens=100_000))
    first_wait = (2 * MATRIX + 2 * 4) * 4 / 1e9 + 2 * VOCAB * WIDTH * 4 / 2 / 1e9  # nothing runs before these
    last_reduce = first_wait
    assert long.exposed == pytest.approx(first_wait + last_reduce, rel=0.05)


@pytest.mark.parametrize("zero3", [True, False])
@pytest.mark.parametrize("tokens", [1, 30, 1000, 30_000])
def test_one_lane_of_each_kind_bounds_the_passes(tokens: int, zero3: bool) -> None:
    times = step_times(place(shapes_of(Net()), Layout(4, 1, zero3)), FAST, Work(tokens))
    passes = times.forward + times.backward
    assert max(times.compute, times.communication) <= passes * (1 + 1e-9)
    assert passes <= (times.compute + times.communication) * (1 + 1e-9)


def test_a_publish_hides_behind_a_long_forward_alone() -> None:
    placed = place(shapes_of(Net()), Layout(2, 2))
    fast = step_times(placed, FAST, Work(tokens=100_000, per_node=2))
    assert fast.hides is True
    slow = replace(FAST, inter=1e6)
    # Of the first block nothing hides but what goes out while later ones are updated.
    behind, alone = (step_times(placed, slow, Work(tokens, per_node=2)) for tokens in (100_000, 1))
    assert 0 < behind.exposed_publish <= behind.publish / BLOCKS
    assert alone.hides is False
    assert alone.publish - alone.optimizer <= alone.exposed_publish < alone.publish


def test_replicas_in_one_node_use_its_links() -> None:
    placed = place(shapes_of(Net()), Layout(2, 2))
    slow_between = replace(FAST, inter=1e6)
    inside = step_times(placed, slow_between, Work(tokens=10, per_node=4))
    across = step_times(placed, slow_between, Work(tokens=10, per_node=2))
    assert across.publish == pytest.approx(1000 * inside.publish)


@pytest.mark.parametrize("replicate", [1, 2])
def test_a_model_without_blocks_is_one_unit(replicate: int) -> None:
    placed = place(shapes_of(NoBlocks()), Layout(2, replicate))
    assert list(placed.owned) == [ROOT]
    times = step_times(placed, FAST, Work(tokens=100, per_node=2))
    assert times.compute == pytest.approx(3 * 2 * 100 * 3 * MATRIX / 1e9)
    assert times.exposed == pytest.approx(times.communication)  # nothing to hide behind
    assert (times.publish > 0) is (replicate > 1)


@pytest.mark.parametrize("layout", [Layout(3, 2), Layout(2, 2, False, torch.bfloat16), Layout(5), Layout(64, 64)])
def test_every_rank_holds_what_it_owns(layout: Layout) -> None:
    placed = place(shapes_of(Net()), layout)
    found = memories(placed, normuon=True)
    assert len(found) == layout.ranks
    owners = list(placed.assignment.owners.values())
    for rank, one in enumerate(found):
        column = rank % layout.shard
        mine, ours = owners.count(rank), sum(owner % layout.shard == column for owner in owners)
        assert (one.owned_weights, one.momentum) == (ours * MATRIX * 4, mine * MATRIX * 4)
        assert one.second_moment == mine * WIDTH * 4
        assert one.update == (MATRIX * 4 + 2 * 5 * MATRIX if mine else 0)
        published = {(unit, owner) for unit, fqns in units_of(placed) for owner in owners_in(placed, fqns, column)}
        assert one.publish == ((ours * MATRIX + 4 * len(published)) * 4 if layout.replicate > 1 else 0)
        rows = VOCAB - min(VOCAB, -(-VOCAB // layout.shard) * column)
        assert one.adam == 2 * (2 * min(rows, -(-VOCAB // layout.shard)) * WIDTH * 4 + 4)
    assert memory(placed, layout.ranks - 1, normuon=True) == found[-1]
    assert evaluate(placed.shapes, layout, FAST, Work(10), Limits(), True).memory == max(found, key=lambda m: m.total)


def units_of(placed: Placed) -> list[tuple[str, list[str]]]:
    return [(unit, [weight.fqn for weight in weights]) for unit, weights in placed.owned.items()]


def owners_in(placed: Placed, fqns: list[str], column: int) -> set[int]:
    owners = {placed.assignment.owners[fqn] for fqn in fqns}
    return {owner for owner in owners if owner % placed.layout.shard == column}


def test_backward_computes_and_fetches_nothing_for_frozen_blocks_that_lead() -> None:
    net = Net()
    for module in (net.emb, net.blocks[0], net.blocks[1]):
        module.requires_grad_(False)
    placed = place(shapes_of(net, lambda name, param: name.startswith("blocks")), Layout(2))
    again = [t.unit for t in transfers(placed, 0) if (t.kind, t.phase) == (Kind.BROADCAST, Phase.BACKWARD)]
    assert again == ["blocks.1", "blocks.2"]  # the first is fetched ahead of its turn, which does not come
    work = Work(tokens=10)
    products = 2 * 10 * (2 * BLOCKS * MATRIX + VOCAB * WIDTH)
    backward = 2 * 2 * 10 * (2 * (BLOCKS - 2) * MATRIX + VOCAB * WIDTH)
    assert step_times(placed, FAST, work).compute == pytest.approx((products + backward) / 1e9)


def test_what_is_around_the_last_unit_keeps_its_weights() -> None:
    shapes = ["stem.w", "body.shared", "body.layers.0.w", "body.layers.1.w"]
    units = ["", "body", "body.layers.0", "body.layers.1"]
    weights = tuple(Weight(fqn, (4, 4), torch.float32, unit, True) for fqn, unit in zip(shapes, units, strict=True))
    matrices = tuple(MatrixSpec(w.fqn, w.shape, w.unit) for w in weights)
    placed = place(ModelShapes("nested", tuple(units), weights, matrices), Layout(2))
    again = [t.unit for t in transfers(placed, 0) if (t.kind, t.phase) == (Kind.BROADCAST, Phase.BACKWARD)]
    assert again == ["body.layers.0"]
    assert memory(placed, 0).unsharded == 4 * (16 + 4) * 4


def test_z2_sends_less_and_keeps_more() -> None:
    z3, z2 = (place(shapes_of(Net()), Layout(4, 1, zero3)) for zero3 in (True, False))
    assert total(transfers(z2, 0), Kind.BROADCAST) < total(transfers(z3, 0), Kind.BROADCAST)
    assert memory(z2, 0).unsharded > memory(z3, 0).unsharded


# ----------------------------------------------------------------------------------------------------- recommendation


def test_the_fastest_that_fits_is_recommended() -> None:
    shapes, work = shapes_of(Net()), Work(tokens=100, per_node=2)
    hardware = replace(FAST, inter=1e8)

    def choose(limit: int | None) -> object:
        options = [evaluate(shapes, one, hardware, work, Limits(limit)) for one in layouts(4, Layout(1))]
        return recommend(options)

    free = choose(None)
    assert len(free.options) == 6
    assert free.best.times.step <= min(o.times.step for o in free.options) * 1.005
    assert free.runner_up is not free.best and len(free.reasons) >= 2
    tight = choose(min(o.memory.total for o in free.options))
    assert tight.best.memory.total == min(o.memory.total for o in free.options)
    assert tight.runner_up is None
    none = choose(1000)
    assert none.best is None and "Nothing fits" in none.reasons[0]


# ---------------------------------------------------------------------------------------------------------------- CLI

LINE = "intra=400GB/s,inter=50GB/s,flops=400T"


def test_report_and_json_say_the_same(capsys, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["plan", f"{HERE}:Net", "--shard", "2", "--replicate", "2", "--hardware", LINE, "--per-node", "2"]
    picture = tmp_path / "plan.svg"
    assert main([*arguments, "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    placed = place(shapes_of(Net()), Layout(2, 2, found["layout"]["mode"] == "Z3"))
    assert found["owners"] == dict(placed.assignment.owners)
    mode = found["layout"]["mode"]
    assert found[mode]["memory"]["total"] == max(memory(placed, rank).total for rank in range(4))
    assert f"{found[mode]['times']['step'] * 1e3:.2f} ms" in text
    for part in ("OWNERS", "MEMORY", "TRAFFIC", "PREDICTED STEP", "RECOMMENDED", "it hides"):
        assert part in text
    assert picture.read_text().startswith("<?xml")


def test_owners_times_and_memory_are_those_of_the_scheme(capsys, tmp_path) -> None:
    shapes = tmp_path / "shapes.json"
    matrices = {f"layers.{i}.square.weight": [64, 64] for i in range(3)} | {"layers.3.long.weight": [64, 256]}
    shapes.write_text(json.dumps(matrices))

    def planned(*options: str) -> dict:
        assert main(["plan", str(shapes), "--shard", "2", "--hardware", LINE, "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    def busiest(scheme: NewtonSchulzFlops, owners: dict[str, int]) -> int:
        return max(sum(scheme(tuple(matrices[name])) for name in owners if owners[name] == rank) for rank in range(2))

    gram = NewtonSchulzFlops("quintic", 7, "float32", "gram")
    found = planned("--ns-form", "gram", "--ns-dtype", "float32", "--ns-steps", "7")
    placed = place(read_shapes(shapes), Layout(2, flops=gram))
    assert found["owners"] == dict(placed.assignment.owners)
    default = planned()
    # A long matrix is as much work as 1.5 square ones in the Gram form, as 3 by the direct one.
    assert busiest(gram, found["owners"]) < busiest(gram, default["owners"])
    times = [one["Z3"]["times"]["optimizer"] for one in (found, default)]
    work = [busiest(gram, found["owners"]), busiest(NewtonSchulzFlops(), default["owners"])]
    assert times[0] / times[1] == pytest.approx(work[0] / work[1])
    assert found["Z3"]["memory"]["update"] - default["Z3"]["memory"]["update"] == 2 * (3 * 64 * 256 + 2 * 64 * 64)


def test_a_shared_block_is_warned_of(capsys) -> None:
    arguments = ["plan", f"{HERE}:shared_block", "--devices", "2"]
    assert main(arguments) == 0
    assert "Warning: 'blocks.2' is the module 'blocks.0' again" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    assert "'blocks.2'" in json.loads(capsys.readouterr().out)["warnings"][0]


def test_without_hardware_there_are_no_times(capsys) -> None:
    assert main(["plan", f"{HERE}:Net", "--devices", "2", "--owners"]) == 0
    text = capsys.readouterr().out
    for fqn, rank in place(shapes_of(Net()), Layout(2)).assignment.owners.items():
        assert any(line.split() == [fqn, "64", "x", "64", str(rank)] for line in text.splitlines())
    assert "MEMORY" in text and "No --hardware" in text and "PREDICTED" not in text
    assert "fit" not in text.split("No --hardware")[1]
    assert main(["plan", f"{HERE}:Net", "--shard", "2", "--memory", "1kB"]) == 0
    assert "Z3 does not fit, Z2 does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the mesh is missing"),
        (["--shard", "3", "--devices", "8"], "are 3 ranks, not --devices 8"),
        (["--replicate", "3", "--devices", "8"], "8 devices do not divide into 3 replicas"),
        (["--shard", "0"], "at least one rank each way"),
        (["--devices", "2", "--memory", "lots"], "--memory='lots'"),
        (["--devices", "2", "--hardware", "intra=1GB/s,flop=1T"], "did you mean 'flops'"),
        (["--devices", "2", "--max-owned", "1kB"], "raise"),
        (["--devices", "2", "--replicate", "0"], "--replicate must be at least 1"),
        (["--devices", "2", "--memory", "1e400"], "--memory='1e400'"),
        (["--devices", "2", "--activations", "1e400"], "--activations='1e400'"),
        (["--devices", "2", "--hardware", ""], "intra is missing"),
        (["--devices", "16", "--hardware", "intra=1GB/s,flops=1T"], "16 ranks at --per-node 8 are on several nodes"),
        (["--devices", "2", "--activations", "1GB"], "--activations says what is not left of --memory"),
        (["--devices", "2", "--memory", "80"], "--memory='80' has no unit"),
        (["--devices", "2", "--plot", "no_such_folder/plan.png"], "there is no folder 'no_such_folder'"),
        (["--devices", "2", "--match", "*.up.*", "nothing"], "'nothing' matches no parameter"),
    ],
)
def test_wrong_arguments_end_in_one_line(capsys, arguments: list[str], message: str) -> None:
    assert main(["plan", f"{HERE}:Net", *arguments]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1


def test_measuring_needs_a_launcher(capsys, tmp_path) -> None:
    assert main(["measure", "--json", str(tmp_path / "machine.json")]) == 2
    assert "start it with torchrun" in capsys.readouterr().err
