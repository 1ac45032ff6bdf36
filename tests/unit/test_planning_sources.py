"""What planning starts from: the hardware line or file, and where a model's shapes come from."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch
from planning_models import BLOCKS, MATRIX, Net

from dmuon_core.planning.hardware import Hardware, parse_hardware, parse_quantity, rate_at
from dmuon_core.planning.layout import Layout, place
from dmuon_core.planning.memory import memory
from dmuon_core.planning.shapes import ROOT, shapes_of
from dmuon_core.planning.source import load_shapes
from dmuon_core.planning.traffic import Kind, transfers

HERE = "planning_models"


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
