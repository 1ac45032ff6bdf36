"""Hook boundaries, stated for trees that users bring."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_trees import (
    ALBERT,
    BLOCK,
    GPT,
    MOE_BLOCK,
    TORCH_LAYER,
    Attention,
    Block,
    Body,
    Bottleneck,
    EncoderDecoder,
    FeedForward,
    ListOfLists,
    MoE,
    MoEBlock,
    NanoGPT,
    OnlyLinears,
    ResNet,
    SelfAttention,
    SharedSubmodule,
    TiedBlocks,
    Tree,
    ViT,
    Wrapper,
    mlp,
    torch_encoder,
    under,
)
from torch import nn

from dmuon_core.boundary import assign_boundaries, default_boundaries
from dmuon_core.targets import muon_targets

FF = ["up.weight", "down.weight"]
CONVS = ["conv1.weight", "conv2.weight"]


def hooks(
    model: nn.Module, predicate: Callable[[nn.Module], bool] | None = None, strict: bool = True
) -> dict[str, list[str]]:
    """Name of the hook module -> names of its targets, in the order returned."""
    found = assign_boundaries(model, muon_targets(model), predicate, strict)
    modules = dict(model.named_modules())
    assert all(modules[name] is module for name, module, _ in found)
    return {name: targets for name, _, targets in found}


def is_a(*classes: type[nn.Module]) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, classes)


def names(model: nn.Module, modules: list[nn.Module]) -> list[str]:
    fqn = {module: name for name, module in model.named_modules()}
    return [fqn[module] for module in modules]


TREES = {
    "gpt": (GPT(), {"layers.0": BLOCK, "layers.1": BLOCK}),
    "gpt-tied-head": (GPT(tied=True), {"layers.0": BLOCK, "layers.1": BLOCK}),
    "one-block": (GPT(layers=1), {"layers.0": BLOCK}),
    "wrapped": (Wrapper(GPT()), {"model.layers.0": BLOCK, "model.layers.1": BLOCK}),
    "nanogpt": (NanoGPT(), {f"transformer.h.{i}": ["c_attn.weight", "c_proj.weight"] for i in range(2)}),
    "nanogpt-one-block": (NanoGPT(layers=1), {"transformer.h.0": ["c_attn.weight", "c_proj.weight"]}),
    "sequential-mlp": (mlp(), {"0": ["weight"], "2": ["weight"]}),
    "resnet": (
        ResNet(),
        {
            "": ["conv1.weight"],
            "layer1.0": [*CONVS, "downsample.0.weight"],
            "layer1.1": CONVS,
            "layer2.0": CONVS,
            "layer2.1": CONVS,
            "layer2.2": CONVS,
        },
    ),
    "resnet-one-block-stages": (
        ResNet((1, 1)),
        {"": ["conv1.weight"], "layer1.0": [*CONVS, "downsample.0.weight"], "layer2.0": CONVS},
    ),
    "encoder-decoder": (
        EncoderDecoder(),
        {f"{side}.block.{i}": FF for side in ("encoder", "decoder") for i in range(2)},
    ),
    "moe": (MoE(), {"layers.0": MOE_BLOCK, "layers.1": MOE_BLOCK}),
    "vit": (ViT(), {"": ["patch_embed.proj.weight"], "blocks.0": BLOCK, "blocks.1": BLOCK}),
    "albert": (ALBERT(), {"layers.0": FF}),
    "list-of-lists": (
        ListOfLists(),
        {
            "layers.0.0": ["qkv.weight", "out.weight"],
            "layers.0.1": FF,
            "layers.1.0": ["qkv.weight", "out.weight"],
            "layers.1.1": FF,
        },
    ),
    "list-of-lists-one-layer": (
        ListOfLists(layers=1),
        {"layers.0.0": ["qkv.weight", "out.weight"], "layers.0.1": FF},
    ),
    "only-linears": (OnlyLinears(), {"": ["fc1.weight", "fc2.weight"]}),
    "multihead-attention": (SelfAttention(), {"": ["attn.in_proj_weight", "attn.out_proj.weight"]}),
    "torch-encoder": (torch_encoder(), {"layers.0": TORCH_LAYER, "layers.1": TORCH_LAYER}),
    "linear-is-the-model": (nn.Linear(4, 4), {"": ["weight"]}),
    "sequential-of-stages": (
        nn.Sequential(
            nn.Conv2d(3, 4, 7),
            nn.Sequential(Bottleneck(), Bottleneck()),
            nn.Sequential(Bottleneck(), Bottleneck()),
        ),
        {"": ["0.weight"], "1.0": CONVS, "1.1": CONVS, "2.0": CONVS, "2.1": CONVS},
    ),
    "sequential-layers": (
        nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))),
        {"0": ["0.weight"], "1": ["0.weight"]},
    ),
    "nothing-to-own": (nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10)), {}),
}


@pytest.mark.parametrize("name", TREES)
def test_default_boundaries_of_known_trees(name: str) -> None:
    model, local = TREES[name]
    expected = {fqn: under(fqn, targets) if fqn else targets for fqn, targets in local.items()}
    assert list(hooks(model).items()) == list(expected.items())
    assert names(model, default_boundaries(model)) == [fqn for fqn in expected if fqn]


def test_weight_tied_across_blocks_goes_to_what_surrounds_them() -> None:
    assert list(hooks(TiedBlocks()).items()) == [
        ("body", ["body.layers.0.up.weight"]),
        ("body.layers.0", ["body.layers.0.down.weight"]),
        ("body.layers.1", ["body.layers.1.down.weight"]),
    ]


def test_submodule_shared_by_blocks_goes_to_what_surrounds_them() -> None:
    attention = ["attn.qkv.weight", "attn.out.weight"]
    assert list(hooks(SharedSubmodule()).items()) == [
        ("", ["layers.0.mlp.up.weight", "layers.0.mlp.down.weight"]),
        ("layers.0", under("layers.0", attention)),
        ("layers.1", under("layers.1", attention)),
    ]


def test_weights_tied_inside_one_block_stay_there() -> None:
    model = GPT()
    model.layers[0].mlp.up.weight = model.layers[0].attn.qkv.weight
    assert "layers.0.attn.qkv.weight" in hooks(model)["layers.0"]
    assert "" not in hooks(model)


def test_container_is_passed_over_even_if_it_has_a_forward() -> None:
    model = Tree()
    model.blocks = nn.Sequential(FeedForward(), FeedForward())
    model.blocks[1].up.weight = model.blocks[0].up.weight
    assert hooks(model)[""] == ["blocks.0.up.weight"]


def test_block_registered_a_second_time_elsewhere() -> None:
    class Aliased(Tree):
        def __init__(self) -> None:
            super().__init__()
            layers = [Block(), Block()]
            self.first = layers[0]
            self.ffs = nn.ModuleList(layer.mlp for layer in layers)
            self.layers = nn.ModuleList(layers)

    model = Aliased()
    assert names(model, default_boundaries(model)) == ["first", "layers.1"]
    # Reached through `ffs`, a feed-forward runs outside its layer.
    assert hooks(model) == {
        "": [*under("first.mlp", FF), *under("ffs.1", FF)],
        "first": ["first.attn.qkv.weight", "first.attn.out.weight"],
        "layers.1": ["layers.1.attn.qkv.weight", "layers.1.attn.out.weight"],
    }


def test_experts_without_a_block_around_them_carry_no_hooks() -> None:
    model = Wrapper(MoEBlock())
    model.head = nn.Linear(4, 3)
    assert hooks(model) == {"": under("model", MOE_BLOCK)}


def test_block_without_a_target_carries_no_hooks() -> None:
    model = GPT()
    model.layers[0].requires_grad_(False)
    assert names(model, default_boundaries(model)) == ["layers.1"]


def test_explicit_targets_decide_what_a_boundary_is() -> None:
    model = NanoGPT()
    table = {"transformer.wpe.weight": model.transformer["wpe"].weight}
    assert names(model, default_boundaries(model, table)) == ["transformer.wpe"]
    with pytest.raises(ValueError, match=r"'other'.*taken from this model"):
        assign_boundaries(model, {"other": nn.Parameter(torch.empty(2, 2))})


def test_cyclic_tree_ends() -> None:
    model = GPT()
    model.layers[0].parent = Wrapper(model)
    found = hooks(model)
    assert [fqn for fqns in found.values() for fqn in fqns].count("layers.1.mlp.up.weight") == 1
    assert found["layers.0"] == under("layers.0", BLOCK)


def test_predicate_takes_the_lowest_ancestor() -> None:
    model = GPT(layers=1)
    found = hooks(model, is_a(Attention, FeedForward, Block))
    assert found == {
        "layers.0.attn": ["layers.0.attn.qkv.weight", "layers.0.attn.out.weight"],
        "layers.0.mlp": ["layers.0.mlp.up.weight", "layers.0.mlp.down.weight"],
    }
    assert hooks(model, is_a(GPT)) == {"": under("layers.0", BLOCK)}
    experts = hooks(MoE(), is_a(FeedForward, MoEBlock))
    assert experts["layers.0"] == under("layers.0", MOE_BLOCK[:3])
    assert experts["layers.1.experts.2"] == under("layers.1.experts.2", FF)


def test_predicate_may_take_the_layer_itself() -> None:
    assert list(hooks(mlp(), is_a(nn.Linear))) == ["0", "2"]


def test_strict_predicate_names_every_unmatched_parameter_and_the_remedy() -> None:
    with pytest.raises(ValueError, match="false on every module around") as raised:
        hooks(GPT(layers=1), is_a(Attention))
    message = str(raised.value)
    assert "'layers.0.mlp.up.weight', 'layers.0.mlp.down.weight'" in message
    assert "qkv" not in message
    assert "hook_boundary_strict=False" in message


def test_loose_predicate_keeps_the_default_boundary() -> None:
    assert hooks(GPT(layers=1), is_a(Attention), strict=False) == {
        "layers.0": ["layers.0.mlp.up.weight", "layers.0.mlp.down.weight"],
        "layers.0.attn": ["layers.0.attn.qkv.weight", "layers.0.attn.out.weight"],
    }
    assert hooks(OnlyLinears(), is_a(Attention), strict=False) == hooks(OnlyLinears())


def test_predicate_on_tied_weights() -> None:
    model = TiedBlocks()
    assert hooks(model, is_a(FeedForward))["body"] == ["body.layers.0.up.weight"]
    assert list(hooks(model, is_a(Body))) == ["body"]


def test_predicate_that_picks_a_list_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a ModuleList for 'layers\.0\.attn\.qkv\.weight'.*no forward"):
        hooks(GPT(), is_a(nn.ModuleList), strict=False)


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    """Random trees of containers, modules and linears, with now and then a shared child or a tied weight."""
    if depth == 0 or draw(st.booleans()):
        return nn.Linear(4, 4) if draw(st.booleans()) else FeedForward()
    kids = draw(st.lists(trees(depth=depth - 1), min_size=1, max_size=3))
    if draw(st.booleans()):
        kids.append(kids[0])
    if draw(st.booleans()) and isinstance(kids[0], nn.Linear) and isinstance(kids[-1], nn.Linear):
        kids[-1].weight = kids[0].weight
    kind = draw(st.sampled_from(["list", "sequential", "dict", "module"]))
    if kind == "list":
        return nn.ModuleList(kids)
    if kind == "sequential":
        return nn.Sequential(*kids)
    named = {f"m{i}": kid for i, kid in enumerate(kids)}
    return nn.ModuleDict(named) if kind == "dict" else module_of(named)


def module_of(named: dict[str, nn.Module]) -> nn.Module:
    module = Tree()
    for name, kid in named.items():
        module.add_module(name, kid)
    return module


@given(trees())
@settings(max_examples=60, deadline=None)
def test_every_target_has_one_boundary_above_all_its_slots(tree: nn.Module) -> None:
    model = Wrapper(tree)
    targets = muon_targets(model)
    found = assign_boundaries(model, targets)
    assert sorted(fqn for _, _, fqns in found for fqn in fqns) == sorted(targets)
    for _, module, fqns in found:
        assert module is model or not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        below = {id(p) for p in module.parameters()}
        assert all(id(targets[fqn]) in below for fqn in fqns)
    blocks = default_boundaries(model)
    for block in blocks:
        assert not any(other is not block and other in set(block.modules()) for other in blocks)
