"""Small models with the module trees that users bring; most are never run, so forwards are identities."""

from __future__ import annotations

import torch
from torch import nn


class Tree(nn.Module):
    """A module that can be called: what hooks need."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Conv1D(Tree):
    """A linear layer with weight [in, out] that is no nn.Linear, as in Hugging Face's GPT-2."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.zeros(n_out))


class Attention(Tree):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)


class FeedForward(Tree):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)


class Block(Tree):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.mlp = FeedForward(dim)


BLOCK = ["attn.qkv.weight", "attn.out.weight", "mlp.up.weight", "mlp.down.weight"]


def under(prefix: str, names: list[str]) -> list[str]:
    return [f"{prefix}.{name}" for name in names]


class GPT(Tree):
    """Blocks in a ModuleList, head tied to the embedding or not."""

    def __init__(self, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(10, 4)
        self.pos = nn.Parameter(torch.empty(6, 4))
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.tok.weight


class NanoGPT(Tree):
    """Everything in one ModuleDict, the blocks under `h`; Conv1D layers in the blocks."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(10, 4),
                "wpe": nn.Embedding(6, 4),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList(Conv1DBlock() for _ in range(layers)),
                "ln_f": nn.LayerNorm(4),
            }
        )
        self.lm_head = nn.Linear(4, 10, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight


class Conv1DBlock(Tree):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = Conv1D(4, 12)
        self.c_proj = Conv1D(4, 4)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


class Bottleneck(Tree):
    def __init__(self, downsample: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 2, 1)
        self.bn1 = nn.BatchNorm2d(2)
        self.conv2 = nn.Conv2d(2, 4, 3)
        self.downsample = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) if downsample else None


class ResNet(Tree):
    """Stages are plain Sequentials of bottlenecks; a stage may have one block only."""

    def __init__(self, blocks: tuple[int, int] = (2, 3)) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7)
        self.layer1 = nn.Sequential(*(Bottleneck(downsample=i == 0) for i in range(blocks[0])))
        self.layer2 = nn.Sequential(*(Bottleneck() for _ in range(blocks[1])))
        self.fc = nn.Linear(4, 5)


class EncoderDecoder(Tree):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(10, 4)
        self.encoder = Stack(self.shared)
        self.decoder = Stack(self.shared)
        self.lm_head = nn.Linear(4, 10)


class Stack(Tree):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.block = nn.ModuleList(FeedForward() for _ in range(2))


class MoEBlock(Tree):
    """A router and a ModuleList of experts next to the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(FeedForward() for _ in range(3))


MOE_BLOCK = [
    "attn.qkv.weight",
    "attn.out.weight",
    "gate.weight",
    *(f"experts.{i}.{name}.weight" for i in range(3) for name in ("up", "down")),
]


class MoE(Tree):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(MoEBlock() for _ in range(2))
        self.head = nn.Linear(4, 10)


class PatchEmbed(Tree):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, 4, 2)


class ViT(Tree):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.empty(1, 1, 4))
        self.pos_embed = nn.Parameter(torch.empty(17, 4))
        self.patch_embed = PatchEmbed()
        self.blocks = nn.Sequential(*(Block() for _ in range(2)))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)


class TiedBlocks(Tree):
    """Two blocks of a body share the weight of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(10, 4)
        self.body = Body()
        self.body.layers[1].up.weight = self.body.layers[0].up.weight
        self.head = nn.Linear(4, 10)


class Body(Tree):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward() for _ in range(2))


class SharedSubmodule(Tree):
    """Two blocks share a whole submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.layers[1].mlp = self.layers[0].mlp
        self.head = nn.Linear(4, 10)


class ALBERT(Tree):
    """One block, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([FeedForward()] * 3)
        self.head = nn.Linear(4, 10)


class ListOfLists(Tree):
    """Layers without a class of their own: each is a ModuleList of attention and feed-forward."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Attention(), FeedForward()]) for _ in range(layers))
        self.head = nn.Linear(4, 10)


class Wrapper(Tree):
    """What a LightningModule around a model looks like; other parameters may sit on it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class OnlyLinears(Tree):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.fc2 = nn.Linear(8, 8)
        self.fc3 = nn.Linear(8, 2)


class SelfAttention(Tree):
    """nn.MultiheadAttention outside any repeated block: its in_proj_weight is a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2)
        self.head = nn.Linear(4, 3)


def torch_encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


TORCH_LAYER = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]
