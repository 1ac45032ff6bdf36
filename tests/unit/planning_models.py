"""Models whose figures have simple formulas, and factories that cannot be planned."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, BLOCKS, VOCAB = 64, 4, 100
MATRIX = WIDTH * WIDTH


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


def shared_block() -> Net:
    net = Net()
    net.blocks[2] = net.blocks[0]
    return net


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


class NoBlocks(nn.Module):
    """All matrices are the model's own: one unit, the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
