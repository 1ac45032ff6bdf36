"""Measure what `Hardware` asks for, on the machine and the process group that this runs in.

Every rank measures at the same time, because ranks that share cores or links slow each other down in training too; the
slowest rank's time counts. Samples are taken in rounds, so that a caller can measure something else in between.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from dmuon_core.api import dedicate_params
from dmuon_core.boundary import default_boundaries
from dmuon_core.optim.muon import Muon
from dmuon_core.optim.newton_schulz import flops
from dmuon_core.planning.hardware import Hardware
from dmuon_core.planning.timing import MUON_PASSES
from dmuon_core.planning.traffic import Kind

_SMALL, _LARGE = 16, 1 << 20  # elements of float32
_BLOCKS = 6
_HOOKED_COLLECTIVES = (2 * _BLOCKS - 1) + _BLOCKS + 3 * _BLOCKS + 3
"""Of a pass over the small model: broadcasts, reduces, FSDP2's of the blocks; the root's two, which have a gradient."""
_HOOKED_OVER_REPLICAS = _BLOCKS // 2 + _BLOCKS + 1
"""With replicas, of two columns: one column's reduces, and FSDP2's all-reduces."""
_STREAMS = 4


@dataclass(frozen=True)
class Probe:
    """What is measured.

    Attributes:
        widths: of the transformer layers whose forward and backward is timed, and shorter sides of the matrices whose
            update is timed.
        tokens, sequence: of one rank's batch.
        ns_dtype: in which Newton-Schulz runs.
        group: ranks of one collective, a row of the mesh; all rows communicate at once. None for all ranks.
    """

    widths: tuple[int, ...] = (128, 256, 512)
    tokens: int = 1024
    sequence: int = 128
    ns_dtype: torch.dtype = torch.bfloat16
    group: int | None = None


class Measurement:
    """Samples of one process group. Building one and every method but :meth:`hardware` are collective."""

    def __init__(self, probe: Probe, device: torch.device) -> None:
        self._probe, self._device = probe, device
        self._size = probe.group or dist.get_world_size()
        if self._size < 2 or dist.get_world_size() % self._size:
            raise ValueError(
                f"{dist.get_world_size()} ranks do not divide into groups of {self._size} that communicate: start at "
                "least two, by torchrun --nproc_per_node 2 -m dmuon_core measure"
            )
        sizes = (dist.get_world_size() // self._size, self._size)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))
        self._group = mesh["shard"].get_group()
        self._replicas = sizes[0]
        self._samples: dict[str, list[float]] = {}
        self._layers = {width: _layer(width).to(device) for width in probe.widths}
        self._updates = {width: self._update(width) for width in probe.widths}
        self._hooked = _hooked_model(mesh if self._replicas > 1 else mesh["shard"], device)
        self._flat = torch.zeros(8 * _LARGE, device=device), torch.ones(8 * _LARGE, device=device)

    def round(self) -> None:
        """Take one sample of everything."""
        probe = self._probe
        for width, layer in self._layers.items():
            batch = torch.randn(probe.tokens // probe.sequence, probe.sequence, width, device=self._device)
            self._sample(f"layer {width}", partial(_forward_backward, layer, batch))
        for width, optimizer in self._updates.items():
            self._sample(f"ns {width}", optimizer.step)
        self._sample("memory", self._stream)
        self._sample("hooks", partial(_forward_backward, self._hooked, torch.ones(1, 8, device=self._device)))
        for kind in _COLLECTIVES:
            for numel in (_SMALL, _LARGE):
                self._sample(f"{kind.name} {numel}", partial(_launch_and_wait, self._collective(kind, numel)))
        layer, batch = self._layers[max(probe.widths)], torch.randn(1, probe.sequence, max(probe.widths))
        batch = batch.to(self._device)
        launch = self._collective(Kind.BROADCAST, 8 * _LARGE)  # about as long as the compute

        def both() -> None:
            works = launch()
            layer(batch)
            _wait(works)

        with torch.no_grad():
            self._sample("compute alone", lambda: layer(batch))
            self._sample("broadcast alone", partial(_launch_and_wait, launch))
            self._sample("both", both)

    def forget(self) -> None:
        """Drop all samples so far, such as those of a round to warm up. Local."""
        self._samples.clear()

    def hardware(self) -> Hardware:
        """The medians of all rounds as constants. Local."""
        probe = self._probe
        found = {name: statistics.median(values) for name, values in self._samples.items()}
        rates = []
        for width, layer in self._layers.items():
            numel = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
            work = 6 * numel * probe.tokens + 3 * 4 * width * probe.tokens * probe.sequence
            rates.append((float(width), work / found[f"layer {width}"]))
        memory = _STREAMS * 3 * self._flat[0].nbytes / found["memory"]
        ns = tuple((float(width), self._ns_rate(width, found[f"ns {width}"], memory)) for width in probe.widths)
        latency = found[f"BROADCAST {_SMALL}"] / self._size
        algorithms = {kind: self._bandwidth(kind, found) for kind in _COLLECTIVES}
        algorithms |= {twin: algorithms[kind] for kind, twin in _TWINS.items()}
        # What a collective takes without bytes is counted by itself.
        collectives = _HOOKED_COLLECTIVES + (_HOOKED_OVER_REPLICAS if self._replicas > 1 else 0)
        hooks = max(0.0, found["hooks"] - latency * collectives)
        overhead = hooks / (3 * (_BLOCKS + 1))  # of a forward; a backward counts for two
        fastest = max(algorithms.values())
        return Hardware(
            fastest, fastest, tuple(rates), ns, memory, latency, overhead, self._overlap(found), algorithms
        )  # fmt: skip

    def _bandwidth(self, kind: Kind, found: dict[str, float]) -> float:
        """Bytes/s through the busiest link, as `through_link` counts them."""
        seconds = max(found[f"{kind.name} {_LARGE}"] - found[f"{kind.name} {_SMALL}"], 1e-9)
        return _link_share(kind, self._size) * 4 * _LARGE / seconds

    def _update(self, width: int) -> Muon:
        """An optimizer of square and of long matrices, more of them where they are small."""
        count = max(1, 512 // width)
        shapes = [(width, width), (width, width), (4 * width, width)] * count
        matrices = [nn.Parameter(torch.randn(shape, device=self._device)) for shape in shapes]
        for matrix in matrices:
            matrix.grad = torch.randn_like(matrix)
        return Muon(matrices, lr=1e-3, ns_dtype=self._probe.ns_dtype)

    def _ns_rate(self, width: int, seconds: float, memory: float) -> float:
        """FLOP/s of the products, when what goes through memory besides them is taken off."""
        shapes = [matrix.shape for matrix in self._updates[width].param_groups[0]["params"]]
        elementwise = sum(MUON_PASSES * 4 * shape.numel() for shape in shapes) / memory
        return sum(flops(*shape) for shape in shapes) / max(seconds - elementwise, seconds / 2)

    def _stream(self) -> None:
        for _ in range(_STREAMS):
            self._flat[0].add_(self._flat[1])

    def _overlap(self, found: dict[str, float]) -> float:
        compute, sent, both = (found[name] for name in ("compute alone", "broadcast alone", "both"))
        return min(1.0, max(0.0, (compute + sent - both) / min(compute, sent)))

    def _sample(self, name: str, run: Callable[[], object]) -> None:
        dist.barrier()
        self._synchronize()
        start = time.perf_counter()
        run()
        self._synchronize()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=self._device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self._samples.setdefault(name, []).append(seconds.item())

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _collective(self, kind: Kind, numel: int) -> Callable[[], list[dist.Work | None]]:
        """Launches ``numel`` elements of one kind; broadcast and reduce in one buffer for each root, as owners do."""
        group, size = self._group, self._size
        parts = [torch.zeros(-(-numel // size), device=self._device) for _ in range(size)]
        whole = torch.zeros(-(-numel // size) * size, device=self._device)
        if kind is Kind.BROADCAST:
            return lambda: [dist.broadcast(p, group=group, group_src=r, async_op=True) for r, p in enumerate(parts)]
        if kind is Kind.REDUCE:
            return lambda: [dist.reduce(p, group=group, group_dst=r, async_op=True) for r, p in enumerate(parts)]
        if kind is Kind.ALL_GATHER:
            return lambda: [_all_gather(whole, parts[0], group=group, async_op=True)]
        if kind is Kind.REDUCE_SCATTER:
            return lambda: [_reduce_scatter(parts[0], whole, group=group, async_op=True)]
        return lambda: [dist.all_reduce(whole, group=group, async_op=True)]


# Renamed in torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_COLLECTIVES = (Kind.BROADCAST, Kind.REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
_TWINS = {Kind.BROADCAST: Kind.PUBLISH, Kind.REDUCE: Kind.REPLICATE_REDUCE, Kind.ALL_REDUCE: Kind.FLAGS}


def _link_share(kind: Kind, group: int) -> float:
    """Part of a buffer that passes the busiest link; see `through_link`."""
    one_way = (group - 1) / group
    return {Kind.ALL_GATHER: one_way, Kind.REDUCE_SCATTER: one_way, Kind.ALL_REDUCE: 2 * one_way}.get(kind, 1.0)


def _hooked_model(mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Blocks with next to nothing to compute, dedicated and sharded: what is left is the host's work."""
    model = nn.Sequential(nn.Linear(8, 8), *(_Block() for _ in range(_BLOCKS)), nn.Linear(8, 1)).to(device)
    dedicate_params(model, mesh, lambda name, param: ".matrix." in name)
    for block in default_boundaries(model, {n: p for n, p in model.named_parameters() if ".matrix." in n}):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.matrix = nn.LayerNorm(8), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.matrix(self.norm(x))


def _layer(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(
        width, max(1, width // 32), 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True,
        bias=False,
    )  # fmt: skip


def _forward_backward(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).sum().backward()


def _launch_and_wait(launch: Callable[[], list[dist.Work | None]]) -> None:
    _wait(launch())


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def measure(probe: Probe, rounds: int, device: torch.device) -> Hardware:
    """Constants of the default process group, after one round to warm up. Collective."""
    measurement = Measurement(probe, device)
    measurement.round()
    measurement.forget()
    for _ in range(rounds):
        measurement.round()
    return measurement.hardware()
