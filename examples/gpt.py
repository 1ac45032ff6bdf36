"""The model and the data of `train_gpt.py`: a small byte-level GPT and the text it reads.

Nothing here knows of processes, sharding or optimizers: it is the model one would write for a single device.
"""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCAB_SIZE = 256  # one token per byte value: no tokenizer to download or to train


@dataclass(frozen=True)
class GPTConfig:
    """Size of the model; `context` is the longest sequence it can read, in bytes."""

    dim: int = 192
    layers: int = 4
    heads: int = 6
    context: int = 128


class Attention(nn.Module):
    """Causal self-attention, [batch, time, dim] -> the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.dim % config.heads:
            raise ValueError(f"dim={config.dim} is not a multiple of heads={config.heads}")
        self.heads = config.heads
        self.q = nn.Linear(config.dim, config.dim, bias=False)
        self.k = nn.Linear(config.dim, config.dim, bias=False)
        self.v = nn.Linear(config.dim, config.dim, bias=False)
        self.proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(layer(x)) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(-2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.down = nn.Linear(4 * config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One transformer layer: attention, then MLP, each normalized first and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.dim)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Next-byte model: tokens [batch, time] of int64 -> logits [batch, time, 256]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_emb = nn.Embedding(VOCAB_SIZE, config.dim)
        self.pos_emb = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCAB_SIZE, bias=False)
        self._init_weights()

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)  # near-uniform predictions at the start
        # Every layer adds twice to the stream; scaled like this, its variance does not grow with depth.
        for name, parameter in self.named_parameters():
            if name.endswith(("attn.proj.weight", "mlp.down.weight")):
                parameter.data *= (2 * self.config.layers) ** -0.5

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tok_emb(tokens) + self.pos_emb(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, *, temperature: float = 0.7, seed: int = 0) -> bytes:
        """Continues `prompt` by `length` sampled bytes; local, for a model that is whole in this process."""
        device = self.head.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        tokens = torch.tensor([list(prompt)], device=device)
        for _ in range(length):
            logits = self(tokens[:, -self.config.context :])[:, -1].float()
            probabilities = torch.softmax(logits / temperature, dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
        return bytes(tokens[0].tolist())


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte; logits [batch, time, 256], targets [batch, time] -> scalar."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def load_text(path: Path | None = None) -> Tensor:
    """The training text as a uint8 tensor: the file `path`, or the sources of this Python's standard library.

    A checksum of their names shuffles the library's files, the same way on every process. So the tail of the
    text, held out for validation, is a fair sample of the whole and not only the modules that begin with z.
    """
    if path is not None:
        data = path.read_bytes()
    else:
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        names = sorted(
            file.relative_to(root).as_posix()
            for file in root.rglob("*.py")
            if not skipped.intersection(file.relative_to(root).parts)
        )
        names.sort(key=lambda name: zlib.crc32(name.encode()))
        data = b"\n".join((root / name).read_bytes() for name in names)
        if len(data) < 1_000_000:
            raise FileNotFoundError(
                f"only {len(data)} bytes of library source in {root}: name a text to learn with --text FILE"
            )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Cuts a text into windows that do not overlap; item: (tokens, next tokens), each [context] of int64."""

    def __init__(self, text: Tensor, context: int) -> None:
        if len(text) <= context:
            raise ValueError(f"a text of {len(text)} bytes has no window of {context} bytes and one more")
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]
