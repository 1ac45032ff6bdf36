"""Planning: where shapes come from, the hardware line, times that can be computed by hand, and the choice."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from dmuon_core.planning.cli import main
from dmuon_core.planning.hardware import Hardware, parse_hardware, parse_quantity, rate_at
from dmuon_core.planning.layout import Layout, place
from dmuon_core.planning.memory import memory
from dmuon_core.planning.recommend import Limits, evaluate, layouts, recommend
from dmuon_core.planning.shapes import ROOT, shapes_of
from dmuon_core.planning.source import load_shapes
from dmuon_core.planning.timing import ADAM_PASSES, MUON_PASSES, Work, step_times
from dmuon_core.planning.traffic import Kind, total, transfers

WIDTH, BLOCKS, VOCAB = 64, 4, 100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


class Net(nn.Module):
    """Only matrices in the blocks, so that every figure has a simple formula."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.emb(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def with_weights() -> Net:
    with torch.device("cpu"):
        return Net()


def not_a_module() -> int:
    return 3


def reads_values() -> nn.Module:
    net = Net()
    if net.head.weight.sum().item() > 0:
        raise AssertionError
    return net


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)


HERE = __name__
FAST = Hardware(1e9, 1e9, ((1.0, 1e9),), ((1.0, 2e9),), latency=0.0)
MATRIX = WIDTH * WIDTH


# ----------------------------------------------------------------------------------------------------------- hardware


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("400GB/s", "bytes/s", 4e11),
        ("400 GBps", "bytes/s", 4e11),
        ("400Gb/s", "bytes/s", 5e10),
        ("100Gbit/s", "bytes/s", 1.25e10),
        ("1.5GiB/s", "bytes/s", 1.5 * 2**30),
        ("3e9", "bytes/s", 3e9),
        ("400T", "FLOP/s", 4e14),
        ("1.2PFLOP/s", "FLOP/s", 1.2e15),
        ("989TFLOPS", "FLOP/s", 9.89e14),
        ("10us", "seconds", 1e-5),
        ("2 ms", "seconds", 2e-3),
        ("0.5", "share", 0.5),
        ("80GB", "bytes", 8e10),
        ("16GiB", "bytes", 2**34),
    ],
)
def test_quantities(text: str, kind: str, value: float) -> None:
    assert math.isclose(parse_quantity(text, kind, "it"), value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("fast", "bytes/s"),
        ("0GB/s", "bytes/s"),
        ("-1T", "FLOP/s"),
        ("10", "seconds"),
        ("1.5", "share"),
        ("8Gb", "bytes"),
    ],
)
def test_a_quantity_of_another_kind_is_refused(text: str, kind: str) -> None:
    with pytest.raises(ValueError, match=r"it='.*write it like"):
        parse_quantity(text, kind, "it")


def test_a_line_and_what_it_leaves_out() -> None:
    found = parse_hardware("intra=400GB/s, flops=400T,overlap=0.9")
    assert found == Hardware(4e11, 4e11, ((1.0, 4e14),), ((1.0, 4e14),), overlap=0.9)
    assert parse_hardware("intra=1GB/s,inter=2GB/s,flops=1T,ns_flops=2T").ns_flops == ((1.0, 2e12),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("intra=1GB/s,flop=1T", "did you mean 'flops'"),
        ("intr=1GB/s,flops=1T", "did you mean 'intra'"),
        ("intra=1GB/s", "flops is missing"),
        ("flops=1T", "intra is missing"),
        ("intra,flops=1T", "'intra' has no value"),
        ("nothing.json", "cannot read nothing.json"),
    ],
)
def test_a_malformed_line_says_what_is_wrong(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_hardware(line)


def test_a_measured_file_comes_back(tmp_path) -> None:
    rates = ((64.0, 1e9), (256.0, 4e9))
    hardware = Hardware(1e9, 2e9, rates, rates, 3e9, 1e-4, 2e-3, 0.25, {Kind.REDUCE: 5e8})
    path = tmp_path / "machine.json"
    path.write_text(hardware.to_json())
    assert parse_hardware(str(path)) == hardware
    path.write_text(json.dumps({"intra": 1e9, "flops": 1e9, "algorithms": {"GOSSIP": 1}}))
    with pytest.raises(ValueError, match="no collective 'GOSSIP'"):
        parse_hardware(str(path))


def test_rates_between_measured_sizes() -> None:
    rate = ((64.0, 1e9), (256.0, 4e9))
    assert [rate_at(rate, size) for size in (8, 64, 256, 999)] == [1e9, 1e9, 4e9, 4e9]
    assert math.isclose(rate_at(rate, 128), 2e9)


# ------------------------------------------------------------------------------------------------------------- shapes


def test_a_module_by_units() -> None:
    shapes = shapes_of(Net())
    assert shapes.units == (ROOT, "blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert {w.fqn: (w.unit, w.owned, w.used) for w in shapes.weights if "blocks" not in w.fqn} == {
        "emb.weight": (ROOT, False, 0.0),
        "head.weight": (ROOT, False, 1.0),
    }
    assert shapes.owned_numel == 2 * BLOCKS * MATRIX


def test_a_tied_head_multiplies() -> None:
    net = Net()
    net.head.weight = net.emb.weight
    assert [w.used for w in shapes_of(net).weights if w.fqn == "emb.weight"] == [1.0]


def test_a_factory_a_json_and_a_csv_give_the_same_plan(tmp_path) -> None:
    model = load_shapes(f"{HERE}:Net")
    entries = {w.fqn: {"shape": w.shape, "kind": "embedding"} if "emb" in w.fqn else w.shape for w in model.weights}
    (tmp_path / "shapes.json").write_text(json.dumps(entries))
    with (tmp_path / "shapes.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "shape"])
        writer.writerows([w.fqn, "x".join(map(str, w.shape))] for w in model.weights)
    for name in ("shapes.json", "shapes.csv"):
        found = load_shapes(str(tmp_path / name))
        if name.endswith(".json"):  # in the CSV "emb" is no word that says what it is
            assert (found.weights, found.units) == (model.weights, model.units)
        for layout in (Layout(2), Layout(2, 2, False)):
            ours, theirs = place(model, layout), place(found, layout)
            assert theirs.assignment.owners == ours.assignment.owners
            assert transfers(theirs, 1) == transfers(ours, 1)
            assert memory(theirs, 1) == memory(ours, 1)


def test_stacked_experts_of_a_file(tmp_path) -> None:
    path = tmp_path / "moe.json"
    path.write_text(json.dumps({"layers.0.experts.up": [4, 8, 16], "layers.0.conv": [8, 8, 3]}))
    shapes = load_shapes(str(path))
    assert {m.fqn: m.parts for m in shapes.matrices} == {
        "layers.0.experts.up": ((8, 16),) * 4,
        "layers.0.conv": ((8, 24),),
    }
    assert [w.used for w in shapes.with_expert_share(0.25).weights] == [0.25, 1.0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no_such_module:f", "cannot import 'no_such_module'"),
        (f"{HERE}:missing", "has no 'missing'; it has"),
        (f"{HERE}:not_a_module", "returned a int"),
        (f"{HERE}:with_weights", r"'emb.weight' is not on the meta device"),
        (f"{HERE}:reads_values", "on the meta device"),
        (f"{HERE}:Vector", "no hidden-layer matrix"),
        ("gone.json", "no file 'gone.json'"),
        ("model", "neither package.module:factory nor"),
    ],
)
def test_a_source_that_cannot_be_planned_says_why(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_shapes(source)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"layers.0.w": "wide"}, "'layers.0.w' has the shape 'wide'"),
        ({"layers.0.w": {"shape": [4, 4], "sort": "muon"}}, "unknown 'sort'"),
        ({"layers.0.w": {"shape": [4, 4], "kind": "sgd"}}, "unknown kind 'sgd'"),
        ({"layers.0.w": {"shape": [4, 4], "dtype": "int7"}}, "unknown dtype 'int7'"),
        ({"layers.0.w": {"shape": [4], "kind": "muon"}}, "Muon takes two or more"),
        ({"w": [4, 4]}, "no matrix for Muon"),
    ],
)
def test_an_entry_that_cannot_be_read_is_named(tmp_path, entries, message: str) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=message):
        load_shapes(str(path))


def test_a_config_of_hugging_face(tmp_path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "vocab_size": 50,
              "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
              "dtype": "bfloat16"}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    shapes = load_shapes(str(path))
    assert len(shapes.matrices) == 21 and shapes.units[1] == "model.layers.0"
    assert {w.dtype for w in shapes.weights} == {torch.bfloat16}
    assert shapes.attention == 2 * 3 * 32
    assert {w.dtype for w in load_shapes(str(path), dtype=torch.float32).weights} == {torch.float32}


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


class NoBlocks(nn.Module):
    """All matrices are the model's own: one unit, the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))


@pytest.mark.parametrize("replicate", [1, 2])
def test_a_model_without_blocks_is_one_unit(replicate: int) -> None:
    placed = place(shapes_of(NoBlocks()), Layout(2, replicate))
    assert list(placed.owned) == [ROOT]
    times = step_times(placed, FAST, Work(tokens=100, per_node=2))
    assert times.compute == pytest.approx(3 * 2 * 100 * 3 * MATRIX / 1e9)
    assert times.exposed == pytest.approx(times.communication)  # nothing to hide behind
    assert (times.publish > 0) is (replicate > 1)


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


def test_without_hardware_there_are_no_times(capsys) -> None:
    assert main(["plan", f"{HERE}:Net", "--devices", "2", "--owners"]) == 0
    text = capsys.readouterr().out
    for fqn, rank in place(shapes_of(Net()), Layout(2)).assignment.owners.items():
        assert any(line.split() == [fqn, "64", "x", "64", str(rank)] for line in text.splitlines())
    assert "MEMORY" in text and "No --hardware" in text and "PREDICTED" not in text


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
    ],
)
def test_wrong_arguments_end_in_one_line(capsys, arguments: list[str], message: str) -> None:
    assert main(["plan", f"{HERE}:Net", *arguments]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1


def test_measuring_needs_a_launcher(capsys, tmp_path) -> None:
    assert main(["measure", "--json", str(tmp_path / "machine.json")]) == 2
    assert "start it with torchrun" in capsys.readouterr().err
