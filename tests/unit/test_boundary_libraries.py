"""Default boundaries on the classes of Hugging Face, on meta, and on trees built as timm and torchvision do it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from model_trees import Tree
from torch import nn

from dmuon_core.boundary import assign_boundaries, default_boundaries
from dmuon_core.targets import muon_targets

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
BERT = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
SWIGLU = [
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
]
CONV1D = ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
VISION = ["attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight"]
BERT_LAYER = [
    *(f"attention.self.{name}.weight" for name in ("query", "key", "value")),
    "attention.output.dense.weight",
    "intermediate.dense.weight",
    "output.dense.weight",
]


def t5(*attentions: str) -> list[str]:
    names = [f"layer.{i}.{name}.{w}.weight" for i, name in enumerate(attentions) for w in "qkvo"]
    return [*names, *(f"layer.{len(attentions)}.DenseReluDense.{w}.weight" for w in ("wi", "wo"))]


def whisper(*attentions: str) -> list[str]:
    names = [f"{name}.{w}_proj.weight" for name in attentions for w in ("k", "v", "q", "out")]
    return [*names, "fc1.weight", "fc2.weight"]


def each(pattern: str, names: list[str], count: int = 2) -> dict[str, list[str]]:
    return {pattern.format(i): names for i in range(count)}


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

# name -> (how it is built, hook module -> its targets below it); "" is the root.
LIBRARIES: dict[str, tuple[Any, dict[str, list[str]]]] = {
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)), each("model.layers.{}", SWIGLU)),
    "llama-tied": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, tie_word_embeddings=True)),
        each("model.layers.{}", SWIGLU),
    ),
    "gpt2": (
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=64, bos_token_id=0, eos_token_id=1)
        ),
        each("transformer.h.{}", CONV1D),
    ),
    "bert": (
        lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)),
        {"": ["cls.predictions.transform.dense.weight"], **each("bert.encoder.layer.{}", BERT_LAYER)},
    ),
    "t5": (
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(d_model=16, d_ff=32, d_kv=4, num_layers=2, num_heads=4, vocab_size=64)
        ),
        {
            **each("encoder.block.{}", t5("SelfAttention")),
            **each("decoder.block.{}", t5("SelfAttention", "EncDecAttention")),
        },
    ),
    "mixtral": (
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, num_local_experts=4)),
        each("model.layers.{}", [*SWIGLU[:4], *EXPERTS, "mlp.gate.weight"]),
    ),
    "qwen2-vl": (
        lambda: hf.Qwen2VLForConditionalGeneration(
            hf.Qwen2VLConfig(
                text_config={**SMALL, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}},
                vision_config={
                    "depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4,
                },
            )
        ),
        {
            "": [
                "model.visual.patch_embed.proj.weight",
                "model.visual.merger.mlp.0.weight",
                "model.visual.merger.mlp.2.weight",
            ],
            **each("model.visual.blocks.{}", VISION),
            **each("model.language_model.layers.{}", SWIGLU),
        },
    ),
    "whisper": (
        lambda: hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(
                d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
                encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                decoder_start_token_id=1,
            )
        ),
        {
            "": ["model.encoder.conv1.weight", "model.encoder.conv2.weight"],
            **each("model.encoder.layers.{}", whisper("self_attn")),
            **each("model.decoder.layers.{}", whisper("self_attn", "encoder_attn")),
        },
    ),
    "hf-resnet": (
        lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
        ),
        {
            "": ["resnet.embedder.embedder.convolution.weight"],
            **each(
                "resnet.encoder.stages.0.layers.{}", ["layer.0.convolution.weight", "layer.1.convolution.weight"]
            ),
            "resnet.encoder.stages.1.layers.0": [
                "shortcut.convolution.weight",
                "layer.0.convolution.weight",
                "layer.1.convolution.weight",
            ],
            "resnet.encoder.stages.1.layers.1": ["layer.0.convolution.weight", "layer.1.convolution.weight"],
        },
    ),
}  # fmt: skip


class TimmAttention(Tree):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)


class TimmMlp(Tree):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(4 * dim, dim)


class TimmBlock(Tree):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = TimmAttention(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = TimmMlp(dim)


class PatchEmbed(Tree):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, 4, 4)


class TimmViT(Tree):
    """`timm.models.vision_transformer`: the blocks are a Sequential."""

    def __init__(self, dim: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 5, dim))
        self.patch_embed = PatchEmbed(dim)
        self.blocks = nn.Sequential(*(TimmBlock(dim) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)


class SwinStage(Tree):
    """`timm.models.swin_transformer`: a stage of its own class with a Sequential of blocks."""

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.downsample = nn.Linear(4 * dim, dim)
        self.blocks = nn.Sequential(*(TimmBlock(dim) for _ in range(depth)))


class TimmSwin(Tree):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(8)
        self.layers = nn.Sequential(SwinStage(8, 2), SwinStage(16, 3))
        self.head = nn.Linear(16, 10)


class BasicBlock(Tree):
    def __init__(self, width: int, downsample: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        if downsample:
            self.downsample = nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width))


class TorchvisionResNet(Tree):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7)
        for stage in range(1, 5):
            blocks = (BasicBlock(4, downsample=stage > 1 and i == 0) for i in range(2))
            setattr(self, f"layer{stage}", nn.Sequential(*blocks))
        self.fc = nn.Linear(4, 10)


CONVS = ["conv1.weight", "conv2.weight"]
LIBRARIES |= {
    "timm-vit": (TimmViT, {"": ["patch_embed.proj.weight"], **each("blocks.{}", VISION)}),
    "timm-swin": (
        TimmSwin,
        {
            "": ["patch_embed.proj.weight", "layers.0.downsample.weight", "layers.1.downsample.weight"],
            **each("layers.0.blocks.{}", VISION),
            **each("layers.1.blocks.{}", VISION, 3),
        },
    ),
    "torchvision-resnet": (
        TorchvisionResNet,
        {
            "": ["conv1.weight"],
            **each("layer1.{}", CONVS),
            **{
                f"layer{stage}.{i}": [*CONVS, "downsample.0.weight"] if i == 0 else CONVS
                for stage in (2, 3, 4)
                for i in range(2)
            },
        },
    ),
    "sequential-mlp": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)),
        {"0": ["weight"], "2": ["weight"]},
    ),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_default_boundaries(name: str) -> None:
    build, below = LIBRARIES[name]
    expected = {fqn: sorted(f"{fqn}.{target}" if fqn else target for target in found) for fqn, found in below.items()}
    with torch.device("meta"):
        model = build()
    found = assign_boundaries(model, muon_targets(model))
    assert {fqn: sorted(targets) for fqn, _, targets in found} == expected
    # What is handed to fully_shard are the same modules, but for the root.
    names = {module: fqn for fqn, module in model.named_modules()}
    assert [names[block] for block in default_boundaries(model)] == [fqn for fqn, _, _ in found if fqn]


def test_experts_get_hooks_of_their_own_when_asked() -> None:
    class Expert(Tree):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 8)
            self.down = nn.Linear(8, 4)

    class Layer(Tree):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 3)
            self.experts = nn.ModuleList(Expert() for _ in range(3))

    class Mixture(Tree):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))
            self.head = nn.Linear(4, 10)

    model = Mixture()
    targets = muon_targets(model)
    assert [fqn for fqn, _, _ in assign_boundaries(model, targets)] == ["layers.0", "layers.1"]
    asked = assign_boundaries(model, targets, lambda module: isinstance(module, (Layer, Expert)))
    assert {fqn: found for fqn, _, found in asked} == {
        f"layers.{i}{below}": found
        for i in range(2)
        for below, found in {
            "": [f"layers.{i}.gate.weight"],
            **{f".experts.{j}": [f"layers.{i}.experts.{j}.{w}.weight" for w in ("up", "down")] for j in range(3)},
        }.items()
    }
