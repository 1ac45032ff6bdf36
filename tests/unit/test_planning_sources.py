"""What planning starts from: where a model's shapes come from."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from planning_models import BLOCKS, MATRIX, Net

from dmuon_core.planning.layout import Layout, place
from dmuon_core.planning.memory import memory
from dmuon_core.planning.shapes import ROOT, shapes_of
from dmuon_core.planning.source import expert_share, load_shapes
from dmuon_core.planning.traffic import transfers

HERE = "planning_models"


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


def test_only_what_the_readme_wraps_is_a_unit_of_fsdp2() -> None:
    net = Net()
    net.blocks[0].norm = torch.nn.LayerNorm(4)
    net.blocks[0].requires_grad_(False)
    shapes = shapes_of(net, lambda name, param: name.startswith("blocks") and param.ndim >= 2)
    assert {w.fqn: w.unit for w in shapes.weights if "blocks.0" in w.fqn} == {
        "blocks.0.up.weight": "blocks.0",
        "blocks.0.down.weight": "blocks.0",
        "blocks.0.norm.weight": ROOT,
        "blocks.0.norm.bias": ROOT,
    }


def test_backward_comes_to_what_trains_and_what_follows() -> None:
    def reached(*frozen: str) -> set[str]:
        net = Net()
        for name, module in net.named_modules():
            if name in frozen:
                module.requires_grad_(False)
        return set(shapes_of(net, lambda name, param: name.startswith("blocks")).reached)

    blocks = [f"blocks.{i}" for i in range(BLOCKS)]
    assert reached("blocks.0") == {ROOT, *blocks}
    assert reached("emb", "blocks.0", "blocks.1", "blocks.3") == {ROOT, "blocks.2", "blocks.3"}
    assert reached("emb", *blocks) == {ROOT}
    assert reached("emb", "head", *blocks) == set()


def test_a_module_that_is_there_twice_is_named() -> None:
    net = Net()
    assert shapes_of(net).repeated == ()
    net.blocks[2] = net.blocks[0]
    net.blocks[3].up = net.blocks[1].up
    net.also = net.emb  # a look-up, no products
    net.blocks[1].owner = [net]  # not in the tree
    assert shapes_of(net).repeated == (("blocks.2", "blocks.0"), ("blocks.3.up", "blocks.1.up"))


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
        (".planning_models:Net", "cannot import '.planning_models'"),
    ],
)
def test_a_source_that_cannot_be_planned_says_why(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_shapes(source)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("raise RuntimeError('no gpu')", "RuntimeError: no gpu"),
        ("def m(: pass", "SyntaxError"),
        ("raise SystemExit(1)", "SystemExit: 1"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(tmp_path, monkeypatch, line: str, message: str) -> None:
    (tmp_path / "planned_module.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"cannot import 'planned_module' .*{message}"):
        load_shapes("planned_module:m")


def test_a_pattern_that_matches_nothing_is_named() -> None:
    assert len(load_shapes(f"{HERE}:Net", patterns=["*.up.*", "blocks.0.*"]).matrices) == BLOCKS + 1
    with pytest.raises(ValueError, match=r"'\*.side.\*' matches no parameter; the matrices are emb.weight"):
        load_shapes(f"{HERE}:Net", patterns=["*.up.*", "*.side.*"])
    with pytest.raises(ValueError, match=r"'norm.\*' matches only parameters that are no matrices"):
        load_shapes(f"{HERE}:Vector", patterns=["norm.*"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("s.json", '{"layers.0.w": [4, 3], "layers.0.w": [400, 300]}', "'layers.0.w' occurs twice"),
        ("s.json", '{"layers.0.w": [1e400, 3]}', "has the shape"),
        ("s.csv", "name,shape\nlayers.0.w,4,3\n", "more cells than the first line"),
        ("s.csv", "name,shape\n,4x3\n", "a line has no name"),
        ("s.csv", "", "must name the columns"),
    ],
)
def test_a_file_of_shapes_that_is_malformed(tmp_path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_shapes(str(tmp_path / name))


def test_a_csv_of_a_spreadsheet(tmp_path) -> None:
    path = tmp_path / "shapes.csv"
    path.write_bytes("\ufeffname, shape,kind,\r\n layers.0.w ,4X3, muon,\r\n\r\n".encode())
    assert [(w.fqn, w.shape, w.owned) for w in load_shapes(str(path)).weights] == [("layers.0.w", (4, 3), True)]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"layers.0.w": "wide"}, "'layers.0.w' has the shape 'wide'"),
        ({"layers.0.w": [4.7, 3]}, "has the shape"),
        ({"layers.0.w": [True, 3]}, "has the shape"),
        ({"layers.0.w": [10**400, 3]}, "has the shape"),
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


def test_the_experts_of_a_config(tmp_path) -> None:
    path = tmp_path / "config.json"
    routed = {"num_experts_per_tok": 2, "num_experts": 8}
    for config, share in (
        ({"model_type": "a", **routed}, 0.25),
        ({"model_type": "a", "vision_config": {"depth": 2}, "text_config": routed}, 0.25),
        ({"model_type": "a"}, None),
        ({"layers.0.w": [4, 4]}, None),
    ):
        path.write_text(json.dumps(config))
        assert expert_share(str(path)) == share


@pytest.mark.parametrize(("model_type", "matrices"), [("vit", 2 * 6), ("llava", 2 * 6 + 1 * 7)])
def test_a_config_that_does_not_name_its_model(tmp_path, model_type: str, matrices: int) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = {"model_type": model_type, **sizes}
    if model_type == "llava":
        text = {"model_type": "llama", **sizes, "num_hidden_layers": 1, "vocab_size": 50}
        vision = {"model_type": "clip_vision_model", **sizes, "image_size": 32, "patch_size": 8}
        config = {"model_type": model_type, "text_config": text, "vision_config": vision}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert sum(".layer" in f".{m.fqn}" for m in load_shapes(str(path)).matrices) == matrices
