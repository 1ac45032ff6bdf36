"""Small models of every shape the runtime has to compose with, by name, so that a rank can build them from a string.

The sizes are odd on purpose: four divides no dimension of the GPT, and nothing divides its vocabulary and MLP width.
Linear layers whose gradient is pure rounding noise (a key bias) are left out, because Adam turns noise into full steps.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

VOCAB, SEQ, DIM, HEADS, HIDDEN, ROWS = 13, 7, 10, 2, 17, 8
FEATURES, CLASSES = 6, 5


def hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """The tests' own rule for what Muon trains: the matrices inside the blocks. Independent of dmuon_core.targets."""
    return parameter.ndim >= 2 and parameter.requires_grad and "blocks." in name


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


# ----------------------------------------------------------------------------------------------------- the parts of GPT


class Attention(nn.Module):
    def __init__(self, dim: int = DIM, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        return self.o((scores.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, dim: int = DIM, hidden: int = HIDDEN, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Pair(NamedTuple):
    hidden: Tensor
    aux: Tensor


@dataclasses.dataclass
class Output:
    hidden: Tensor
    aux: Tensor
    note: str = "not a tensor"


@dataclasses.dataclass(frozen=True)
class FrozenOutput:
    hidden: Tensor
    aux: Tensor


@dataclasses.dataclass
class MappingOutput(OrderedDict):
    """An ordered dict that is a dataclass too and drops its None fields, as ModelOutput of Hugging Face does."""

    hidden: Tensor
    aux: Tensor
    cache: Tensor | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                OrderedDict.__setitem__(self, field.name, getattr(self, field.name))


# kind -> (pack hidden and aux, unpack them again)
CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda h, a: (h, a), lambda o: o),
    "list": (lambda h, a: [a, h], lambda o: (o[1], o[0])),
    "dict": (lambda h, a: {"hidden": h, "aux": a}, lambda o: (o["hidden"], o["aux"])),
    "namedtuple": (Pair, lambda o: (o.hidden, o.aux)),
    "dataclass": (Output, lambda o: (o.hidden, o.aux)),
    "frozen_dataclass": (FrozenOutput, lambda o: (o.hidden, o.aux)),
    "mapping_dataclass": (MappingOutput, lambda o: (o["hidden"], o["aux"])),
    "nested": (
        lambda h, a: {"n": None, "i": torch.arange(3), "deep": [1, (Output(h, a), "x")], "detached": h.detach()},
        lambda o: (o["deep"][1][0].hidden, o["deep"][1][0].aux),
    ),
}


class Block(nn.Module):
    def __init__(
        self,
        output: str = "tensor",
        inside: str = "",
        bias: bool = True,
        unused: bool = False,
        dim: int = DIM,
        hidden: int = HIDDEN,
    ) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim)
        self.norm2, self.mlp = nn.LayerNorm(dim), MLP(dim, hidden, bias)
        self.output, self.inside = output, inside
        if unused:
            self.never = nn.Linear(dim, dim + 1, bias=False)

    def core(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def forward(self, x: Any, scale: Tensor | None = None) -> Any:
        if isinstance(x, dict):
            x = x["x"]
        x = checkpoint(self.core, x, use_reentrant=self.inside == "reentrant") if self.inside else self.core(x)
        if scale is not None:
            x = x * scale
        if self.output == "view":
            return x.flatten(0, 1).unflatten(0, x.shape[:2])
        return x if self.output == "tensor" else CONTAINERS[self.output][0](x, x.square().mean())


class GPT(nn.Module):
    """Token and position embeddings, blocks, norm, head. `skip` names blocks that the forward leaves out."""

    def __init__(
        self,
        layers: int = 3,
        output: str = "tensor",  # what each block returns: "tensor", "view" of one, or a key of CONTAINERS
        root_output: str = "tensor",  # what the model returns
        inside: str = "",  # "reentrant" or "nonreentrant": a checkpoint inside the block's forward
        outside: str = "",  # the same around the call of the block
        times: int = 1,  # each block is called so often in a row
        call: str = "positional",  # or "keyword", or "container"
        bias: bool = True,
        unused: bool = False,
        in_place: bool = False,  # the model changes each block's output in place
        vocab: int = VOCAB,
        dim: int = DIM,
        hidden: int = HIDDEN,
    ) -> None:
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(vocab, dim), nn.Embedding(SEQ, dim)
        self.blocks = nn.ModuleList(Block(output, inside, bias, unused and i == 1, dim, hidden) for i in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.output, self.root_output, self.outside, self.times, self.call = output, root_output, outside, times, call
        self.in_place = in_place
        self.skip: set[int] = set()

    def call_block(self, block: nn.Module, x: Tensor) -> Any:
        if self.outside:
            return checkpoint(block, x, use_reentrant=self.outside == "reentrant")
        if self.call == "keyword":
            return block(x=x, scale=torch.tensor(1.25))
        if self.call == "container":
            return block({"x": x, "other": None})
        return block(x)

    def forward(self, tokens: Tensor) -> Any:
        x = self.tok_emb(tokens) + self.pos_emb(torch.arange(tokens.shape[1], device=tokens.device))
        aux: Tensor | float = 0.0
        for index, block in enumerate(self.blocks):
            for _ in range(0 if index in self.skip else self.times):
                out = self.call_block(block, x)
                if self.output in ("tensor", "view"):
                    x = out
                else:
                    x, extra = CONTAINERS[self.output][1](out)
                    aux = aux + extra
                if self.in_place:
                    x.mul_(1.25)
        logits = self.head(self.norm(x))
        if self.root_output != "tensor":
            return CONTAINERS[self.root_output][0](logits, logits.square().mean())
        return logits if self.output in ("tensor", "view") else (logits, aux)


def loss_of(output: Any, target: Tensor, root_output: str = "tensor") -> Tensor:
    """Cross entropy, plus a hundredth of the auxiliary value where the model returns one."""
    aux: Tensor | float = 0.0
    if root_output != "tensor":
        output, aux = CONTAINERS[root_output][1](output)
    elif isinstance(output, tuple):
        output, aux = output
    return F.cross_entropy(output.flatten(0, -2).float(), target.flatten()) + 0.01 * aux


class StepGPT(GPT):
    """Trained through `training_step`; a parameter of its own sits on the root."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(3))

    def training_step(self, tokens: Tensor, target: Tensor) -> Tensor:
        return loss_of(self(tokens) * self.temperature.mean(), target)


# -------------------------------------------------------------------------------------------------------- other models


class FloatBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(FEATURES), MLP(FEATURES, 9)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class FloatNet(nn.Module):
    """The blocks come first: the input of block 0 needs no gradient, so nothing marks the end of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(FloatBlock() for _ in range(3)), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ExpertBlock(nn.Module):
    """One expert of two runs. Without biases: FSDP2 itself needs every parameter it manages used on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.experts = nn.ModuleList(MLP(FEATURES, 9, bias=False) for _ in range(2))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return x + self.experts[expert](self.norm(x))


class ExpertNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(ExpertBlock() for _ in range(2)), nn.Linear(FEATURES, CLASSES)
        self.expert = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.expert)
        return self.head(x)


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, 6)
        self.wide, self.back = nn.Conv2d(6, 9, 3, padding=1), nn.Conv2d(9, 6, (1, 3), padding=(0, 1), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(F.gelu(self.wide(self.norm(x))))


class ConvNet(nn.Module):
    """Four-dimensional weights: Muon sees [out, in * height * width]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(1, 6, 3), nn.ModuleList(ConvBlock() for _ in range(2))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((-1, -2)))


def sequential() -> nn.Module:
    """No repeated block: the root carries the hooks. The names carry "blocks." to fit `hidden_matrix`."""
    body = nn.Sequential(nn.Linear(FEATURES, 9), nn.GELU(), nn.Linear(9, 8), nn.GELU())
    return nn.Sequential(OrderedDict(blocks=body, head=nn.Linear(8, CLASSES)))


def _gpt(**options: Any) -> Callable[[], nn.Module]:
    return lambda: GPT(**options)


def _changed(change: Callable[[GPT], None], **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = GPT(**options)
        change(model)
        return model

    return build


def _tie_head(model: GPT) -> None:
    model.head.weight = model.tok_emb.weight


def _tie_between_blocks(model: GPT) -> None:
    model.blocks[2].mlp.up.weight = model.blocks[0].mlp.up.weight


def _tie_in_block(model: GPT) -> None:
    for block in model.blocks:
        block.attn.k.weight = block.attn.q.weight


def _share_module(model: GPT) -> None:
    model.blocks[1].mlp = model.blocks[0].mlp


def _freeze_matrices(model: GPT) -> None:
    model.blocks[0].attn.q.weight.requires_grad_(False)
    model.blocks[2].mlp.down.weight.requires_grad_(False)


def _freeze_block(model: GPT) -> None:
    model.tok_emb.requires_grad_(False)
    model.pos_emb.requires_grad_(False)
    model.blocks[0].requires_grad_(False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": GPT,
    "gpt_two_layers": _gpt(layers=2),
    "gpt_four_layers": _gpt(layers=4),
    "wide": _gpt(layers=4, dim=64, hidden=256),
    **{f"inside_{kind}": _gpt(inside=kind) for kind in ("reentrant", "nonreentrant")},
    **{f"outside_{kind}": _gpt(outside=kind) for kind in ("reentrant", "nonreentrant")},
    "twice": _gpt(times=2),
    "twice_outside_nonreentrant": _gpt(times=2, outside="nonreentrant"),
    "twice_inside_nonreentrant": _gpt(times=2, inside="nonreentrant"),
    **{f"output_{kind}": _gpt(output=kind) for kind in CONTAINERS},
    **{f"root_output_{kind}": _gpt(root_output=kind) for kind in ("dict", "dataclass", "mapping_dataclass")},
    "output_view": _gpt(output="view"),
    "output_in_place": _gpt(in_place=True),
    "output_view_in_place": _gpt(output="view", in_place=True),
    "call_keyword": _gpt(call="keyword"),
    "call_container": _gpt(call="container"),
    "unused": _gpt(unused=True),
    "tied_head": _changed(_tie_head),
    "tied_between_blocks": _changed(_tie_between_blocks),
    "tied_in_block": _changed(_tie_in_block),
    "shared_module": _changed(_share_module, bias=False),
    "frozen_matrices": _changed(_freeze_matrices),
    "frozen_block": _changed(_freeze_block),
    "step_gpt": StepGPT,
    "float": FloatNet,
    "experts": ExpertNet,
    "conv": ConvNet,
    "sequential": sequential,
}


def batch_for(model: str, step: int, micro: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Rows `rank` of `world` of the global batch of a micro-step: together the ranks see the same ROWS rows as one."""
    generator = torch.Generator().manual_seed(1000 * step + micro + 7)
    if model in ("float", "experts", "sequential", "conv"):
        shape = (ROWS * 3, 1, 6, 6) if model == "conv" else (ROWS * 3, FEATURES)
        inputs = torch.randn(shape, generator=generator)
        target = torch.randint(0, CLASSES, (ROWS * 3,), generator=generator)
    else:
        text = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=generator)
        inputs, target = text[:, :-1], text[:, 1:]
    rows = len(inputs) // world
    return inputs[rank * rows : (rank + 1) * rows], target[rank * rows : (rank + 1) * rows]
