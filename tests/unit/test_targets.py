"""Default Muon targets, stated for trees that users bring."""

from __future__ import annotations

import pytest
import torch
from model_trees import (
    ALBERT,
    BLOCK,
    GPT,
    MOE_BLOCK,
    TORCH_LAYER,
    Attention,
    EncoderDecoder,
    FeedForward,
    ListOfLists,
    MoE,
    NanoGPT,
    OnlyLinears,
    PatchEmbed,
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

from dmuon_core.targets import muon_targets, output_heads

FF = ["up.weight", "down.weight"]
TREES = {
    "gpt": (GPT(), under("layers.0", BLOCK) + under("layers.1", BLOCK)),
    "gpt-tied-head": (GPT(tied=True), under("layers.0", BLOCK) + under("layers.1", BLOCK)),
    "one-block": (GPT(layers=1), under("layers.0", BLOCK)),
    "wrapped": (Wrapper(GPT()), under("model.layers.0", BLOCK) + under("model.layers.1", BLOCK)),
    "nanogpt": (NanoGPT(), [f"transformer.h.{i}.{n}.weight" for i in range(2) for n in ("c_attn", "c_proj")]),
    "sequential-mlp": (mlp(), ["0.weight", "2.weight"]),
    "resnet": (
        ResNet(),
        [
            "conv1.weight",
            "layer1.0.conv1.weight",
            "layer1.0.conv2.weight",
            "layer1.0.downsample.0.weight",
            *under("layer1.1", ["conv1.weight", "conv2.weight"]),
            *(name for i in range(3) for name in under(f"layer2.{i}", ["conv1.weight", "conv2.weight"])),
        ],
    ),
    "encoder-decoder": (
        EncoderDecoder(),
        [f"{side}.block.{i}.{n}" for side in ("encoder", "decoder") for i in range(2) for n in FF],
    ),
    "moe": (MoE(), under("layers.0", MOE_BLOCK) + under("layers.1", MOE_BLOCK)),
    "vit": (ViT(), ["patch_embed.proj.weight", *under("blocks.0", BLOCK), *under("blocks.1", BLOCK)]),
    "tied-blocks": (
        TiedBlocks(),
        ["body.layers.0.up.weight", "body.layers.0.down.weight", "body.layers.1.down.weight"],
    ),
    "shared-submodule": (
        SharedSubmodule(),
        under("layers.0", BLOCK) + under("layers.1", ["attn.qkv.weight", "attn.out.weight"]),
    ),
    "albert": (ALBERT(), under("layers.0", FF)),
    "list-of-lists": (
        ListOfLists(),
        [f"layers.{i}.{n}.weight" for i in range(2) for n in ("0.qkv", "0.out", "1.up", "1.down")],
    ),
    "only-linears": (OnlyLinears(), ["fc1.weight", "fc2.weight"]),
    "multihead-attention": (SelfAttention(), ["attn.in_proj_weight", "attn.out_proj.weight"]),
    "torch-encoder": (torch_encoder(), under("layers.0", TORCH_LAYER) + under("layers.1", TORCH_LAYER)),
    "linear-is-the-model": (nn.Linear(4, 4), ["weight"]),
    "embedding-and-head": (nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10)), []),
}


@pytest.mark.parametrize("name", TREES)
def test_targets_of_known_trees(name: str) -> None:
    model, expected = TREES[name]
    targets = muon_targets(model)
    assert list(targets) == expected
    parameters = dict(model.named_parameters())
    assert all(parameters[fqn] is parameter for fqn, parameter in targets.items())


class Child(Tree):
    """A module with one attribute, before a head that keeps `attribute` from being the last linear layer."""

    def __init__(self, attribute: nn.Module) -> None:
        super().__init__()
        self.attribute = attribute
        self.head = nn.Linear(4, 3)


class VocabEmbedding(Tree):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(10, 4))


class Table(VocabEmbedding):
    """Not named an embedding, but derived from one."""


class Raw(Tree):
    """Bare parameters in a leaf: nothing else could hold its weights."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=value.is_floating_point()))


@pytest.mark.parametrize(
    "module",
    [
        nn.Embedding(10, 4),
        nn.EmbeddingBag(10, 4),
        VocabEmbedding(),
        Table(),
        nn.LayerNorm((4, 4)),
        nn.Linear(4, 1),
        nn.Linear(1, 4),
        nn.Linear(4, 4).requires_grad_(False),
        Raw(bias=torch.empty(4, 4), relative_bias_table=torch.empty(9, 4)),
        Raw(gamma=torch.empty(4, 1, 1)),
        Raw(weight=torch.zeros(4, 4, dtype=torch.int8)),
        Raw(weight=torch.zeros(4, 4, dtype=torch.complex64)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_no_hidden_matrix(module: nn.Module) -> None:
    assert list(muon_targets(Child(module))) == []


def test_recurrent_and_raw_weights_are_targets() -> None:
    lstm = muon_targets(Child(nn.LSTM(4, 4, batch_first=True)))
    assert list(lstm) == ["attribute.weight_ih_l0", "attribute.weight_hh_l0"]
    experts = muon_targets(Child(Raw(gate_up_proj=torch.empty(2, 4, 8), gate_up_proj_bias=torch.empty(2, 8))))
    assert list(experts) == ["attribute.gate_up_proj"]


def test_bare_parameter_counts_inside_a_block_only() -> None:
    class RawBlock(Tree):
        def __init__(self) -> None:
            super().__init__()
            self.w_in = nn.Parameter(torch.empty(4, 4))
            self.norm = nn.LayerNorm(4)

    model = Tree()
    model.layers = nn.ModuleList([RawBlock(), RawBlock()])
    model.table = nn.Parameter(torch.empty(6, 4))
    assert list(muon_targets(model)) == ["layers.0.w_in", "layers.1.w_in"]


def test_patch_projection_of_any_naming_is_a_target_and_tokens_are_not() -> None:
    assert list(muon_targets(PatchEmbed())) == ["proj.weight"]
    assert not {"cls_token", "pos_embed"} & set(muon_targets(ViT()))


def test_frozen_head_is_still_the_head() -> None:
    model = OnlyLinears()
    model.fc3.requires_grad_(False)
    assert list(muon_targets(model)) == ["fc1.weight", "fc2.weight"]


def test_tied_head_leaves_later_linears_alone() -> None:
    model = GPT(tied=True)
    model.transform = nn.Linear(4, 4)
    assert output_heads(model) == [model.head]
    assert "transform.weight" in muon_targets(model)


def test_declared_head_wins_over_the_last_linear() -> None:
    class Declared(GPT):
        def get_output_embeddings(self) -> nn.Module:
            return self.head

    model = Declared()
    model.probe = nn.Linear(4, 4)
    wrapped = Wrapper(model)
    assert output_heads(wrapped) == [model.head]
    assert "model.probe.weight" in muon_targets(wrapped)
    assert "model.head.weight" not in muon_targets(wrapped)


@pytest.mark.parametrize("declared", [None, NotImplementedError])
def test_undeclared_head_is_the_last_linear(declared: type[Exception] | None) -> None:
    class Undeclared(GPT):
        def get_output_embeddings(self) -> None:
            if declared is not None:
                raise declared

    model = Undeclared()
    assert output_heads(model) == [model.head]


def test_last_layer_of_nested_sequentials_is_the_head() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    assert list(muon_targets(model)) == ["0.0.weight", "1.0.weight"]


def test_stack_of_blocks_without_a_head_has_none() -> None:
    model = nn.Sequential(FeedForward(), FeedForward())
    assert output_heads(model) == []
    assert list(muon_targets(model)) == under("0", FF) + under("1", FF)


def test_head_before_the_blocks_is_found() -> None:
    model = Tree()
    model.head = nn.Linear(4, 10)
    model.layers = nn.ModuleList([Attention(), Attention()])
    assert list(muon_targets(model)) == [f"layers.{i}.{n}.weight" for i in range(2) for n in ("qkv", "out")]


def test_weight_tied_to_an_embedding_is_excluded_wherever_it_sits() -> None:
    model = GPT()
    model.layers[0].mlp.extra = nn.Linear(4, 10)
    model.layers[0].mlp.extra.weight = model.tok.weight
    assert "layers.0.mlp.extra.weight" not in muon_targets(model)
    assert "tok.weight" not in muon_targets(model)


def test_lazy_parameters_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'0\.weight'.*run the model"):
        muon_targets(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)))


def test_meta_device_gives_the_same_names() -> None:
    with torch.device("meta"):
        model = GPT()
    assert list(muon_targets(model)) == TREES["gpt"][1]
