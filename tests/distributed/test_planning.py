"""The planned owners, bytes and memory against what real processes issue and hold: equal, no tolerance."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dmuon_core.assignment import MatrixSpec
from dmuon_core.planning.hardware import parse_hardware
from dmuon_core.planning.layout import Layout, place
from dmuon_core.planning.memory import Memory, memory, update_bytes
from dmuon_core.planning.shapes import shapes_of
from dmuon_core.planning.timing import Work, step_times
from dmuon_core.planning.traffic import Axis, Kind, transfers
from dmuon_core.streams import CpuStreams, replace_streams
from tests.distributed.counting import extra_bytes
from tests.distributed.harness import run_distributed
from tests.distributed.models import DIM, GPT, SEQ, VOCAB

CASES = pytest.mark.parametrize(
    ("shard", "replicate", "zero3", "half"),
    [
        (2, 1, True, True),
        (2, 1, False, False),
        pytest.param(4, 1, True, False, marks=pytest.mark.slow),
        pytest.param(4, 1, False, True, marks=pytest.mark.slow),
        pytest.param(2, 2, True, False, marks=pytest.mark.slow),
        pytest.param(2, 2, False, True, marks=pytest.mark.slow),
        (1, 2, True, False),
    ],
)
_OPERATORS = {
    "broadcast_": (Kind.BROADCAST, Kind.PUBLISH),
    "reduce_": (Kind.REDUCE, Kind.REPLICATE_REDUCE),
    "allreduce_": (Kind.FLAGS, Kind.ALL_REDUCE),
    "_allgather_base_": (Kind.ALL_GATHER,),
    "_reduce_scatter_base_": (Kind.REDUCE_SCATTER,),
}


def build(half: bool) -> tuple[nn.Module, MixedPrecisionPolicy]:
    """Four blocks, of which one matrix is frozen; ``half`` computes in bfloat16 and reduces in float32."""
    torch.manual_seed(0)
    model = GPT(layers=4)
    model.blocks[1].attn.k.weight.requires_grad_(False)
    model.pos_emb.weight.requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else None
    return model, policy or MixedPrecisionPolicy()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 17), nn.Linear(17, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Stem(nn.Module):
    """Four blocks behind a layer of its own; with ``tied`` the first block and the last share a matrix."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(DIM, VOCAB)
        if tied:
            self.blocks[3].up.weight = self.blocks[0].up.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.stem(self.emb(tokens)).tanh()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def in_blocks(name: str, param: nn.Parameter) -> bool:
    return name.startswith("blocks.") and param.ndim >= 2


def build_other(kind: str) -> tuple[nn.Module, Any]:
    """The model of `OTHERS` and its predicate."""
    torch.manual_seed(0)
    model = Stem(tied=kind == "matrices of the root")
    if kind == "matrices of the root":
        return model, None
    frozen = [model.blocks[2]] if kind == "a frozen block between" else [model.emb, model.stem, *model.blocks[:2]]
    for module in frozen:
        module.requires_grad_(False)
    return model, in_blocks


OTHERS = pytest.mark.parametrize(
    ("kind", "zero3"),
    [
        ("matrices of the root", True),
        ("frozen blocks first", True),
        pytest.param("matrices of the root", False, marks=pytest.mark.slow),
        pytest.param("a frozen block between", True, marks=pytest.mark.slow),
        pytest.param("frozen blocks first", False, marks=pytest.mark.slow),
    ],
)


def layout_of(shard: int, replicate: int, zero3: bool, half: bool) -> Layout:
    dtypes = (torch.bfloat16, torch.float32) if half else (None, None)
    return Layout(shard, replicate, zero3, *dtypes)


class Bytes(TorchDispatchMode):
    """Bytes of the largest buffer of every collective, by operator and by whether its group is a row of the mesh.

    Also the most that FSDP2 has gathered, looked at whenever it gathers more.
    """

    def __init__(self, rows: list[list[int]], model: nn.Module) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()
        self.most_gathered = 0
        self._rows = rows
        groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
        self._sharded = [param for group in groups if group is not None for param in group.fsdp_params]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(kind, type) and issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
            sizes = [sum(t.nbytes for t in tree_leaves(a) if isinstance(t, torch.Tensor)) for a in args]
            group = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
            axis = "shard" if ranks in self._rows else "other"
            self.found[name.split("::")[1], axis] += max(sizes)
            if "allgather" in name:
                gathered = [out for param in self._sharded for out in param.all_gather_outputs]
                here = max(sizes) + sum(out.untyped_storage().nbytes() for out in gathered)
                self.most_gathered = max(self.most_gathered, here)
        return func(*args, **(kwargs or {}))


def train(shard: int, replicate: int, zero3: bool, half: bool, other: str | None = None) -> dict[str, Any]:
    from dmuon_core import Muon, dedicate_params, default_boundaries

    model, policy = build(half)
    predicate = None
    if other is not None:
        model, predicate = build_other(other)
    mesh = (
        init_device_mesh("cpu", (shard,))
        if replicate == 1
        else init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))
    )
    recorder = Recorder()
    replace_streams(lambda device: recorder)
    dedicated = dedicate_params(model, mesh, predicate, reshard_after_forward=zero3, mp_policy=policy)
    recorder.dedicated = dedicated
    for block in default_boundaries(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=zero3, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = Muon(model, lr=0.01, normuon=True)

    def passes() -> None:
        torch.manual_seed(dist.get_rank())
        tokens = torch.randint(0, VOCAB, (2, SEQ))
        model(tokens).float().square().mean().backward()

    passes()
    optimizer.step()
    optimizer.zero_grad()
    rows = [list(range(first, first + shard)) for first in range(0, shard * replicate, shard)]
    recorder.most.clear()
    with Bytes(rows, model) as counted:
        passes()
        gradients = held([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return {
        "owners": dict(dedicated.assignment.owners),
        "bytes": dict(counted.found),
        "gathered": counted.most_gathered,
        "gradients": gradients,
        "weights": held(model.parameters()),
        "momentum": held(s["momentum_buffer"] for s in optimizer.state.values() if "momentum_buffer" in s),
        "second": held(s["second_momentum_buffer"] for s in optimizer.state.values() if "second_momentum_buffer" in s),
        "adam": held(t for s in optimizer.state.values() if "exp_avg" in s for t in s.values()),
        "most": dict(recorder.most),
    }


def held(tensors: Any) -> dict[str, int]:
    """Bytes of the storages under the local tensors, each storage once, of owned and of other tensors."""
    from dmuon_core import OwnedTensor

    found: dict[str, dict[int, int]] = {"owned": {}, "other": {}}
    for tensor in tensors:
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage.nbytes():
            found["owned" if isinstance(tensor, OwnedTensor) else "other"][storage.data_ptr()] = storage.nbytes()
    return {kind: sum(sizes.values()) for kind, sizes in found.items()}


class Recorder(CpuStreams):
    """The most bytes of each kind of packed buffer, looked at whenever one is allocated."""

    dedicated: Any = None

    def __init__(self) -> None:
        self.most: Counter[str] = Counter()

    def allocate(self, buffer: torch.Tensor) -> None:
        super().allocate(buffer)
        if self.dedicated is None:
            return
        groups = self.dedicated.groups
        local = [p.grad for p in self.dedicated.model.parameters() if not isinstance(p, DTensor)]
        local += [p.unsharded.grad for p in self.dedicated.params if p.unsharded is not None]
        now = {
            "unsharded": sum(b.buffer.untyped_storage().nbytes() for g in groups for b in g._buckets),
            # The one that is being packed is not in the list yet, and the publication's neither.
            "packed": sum(b.buffer.untyped_storage().nbytes() for g in groups for b in g.grads._packed),
            "publish": sum(b.buffer.untyped_storage().nbytes() for g in groups for b in g.publication._packed),
            "local": sum(grad.nbytes for grad in local if grad is not None),
        }
        for kind, size in now.items():
            self.most[kind] = max(self.most[kind], size)

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        if self.dedicated is not None:
            groups = self.dedicated.groups
            for kind, held_by in (("packed", "grads"), ("publish", "publication")):
                packed = [b for g in groups for b in getattr(g, held_by)._packed]
                self.most[kind] = max(self.most[kind], sum(b.buffer.untyped_storage().nbytes() for b in packed))
        return super().launch(*args, **kwargs)


@CASES
def test_plan_equals_a_run(shard: int, replicate: int, zero3: bool, half: bool) -> None:
    model, _ = build(half)
    placed = place(shapes_of(model), layout_of(shard, replicate, zero3, half))
    results = run_distributed(train, shard * replicate, shard, replicate, zero3, half)
    for rank, result in enumerate(results):
        assert result["owners"] == dict(placed.assignment.owners)
        assert result["bytes"] == planned_bytes(placed, rank % shard)
        check_memory(result, memory(placed, rank, normuon=True), half)


@OTHERS
def test_plan_equals_a_run_of_other_models(kind: str, zero3: bool) -> None:
    model, predicate = build_other(kind)
    placed = place(shapes_of(model, predicate), Layout(2, 1, zero3))
    for rank, result in enumerate(run_distributed(train, 2, 2, 1, zero3, False, kind)):
        assert result["owners"] == dict(placed.assignment.owners)
        assert result["bytes"] == planned_bytes(placed, rank)
        planned = memory(placed, rank, normuon=True)
        assert result["gathered"] == planned.gathered
        assert result["most"]["unsharded"] == planned.unsharded
        assert result["weights"] == {"owned": planned.owned_weights, "other": planned.sharded_weights}
        assert result["gradients"] == {"owned": planned.owned_gradients, "other": planned.sharded_gradients}


def planned_bytes(placed: Any, column: int) -> dict[tuple[str, str], int]:
    expected: Counter[tuple[str, str]] = Counter()
    for transfer in transfers(placed, column):
        operator = next(name for name, kinds in _OPERATORS.items() if transfer.kind in kinds)
        along_row = transfer.axis is Axis.SHARD or (transfer.axis is Axis.MESH and placed.layout.replicate == 1)
        expected[operator, "shard" if along_row else "other"] += transfer.nbytes
    return dict(expected)


def check_memory(result: dict[str, Any], planned: Memory, half: bool) -> None:
    assert result["weights"] == {"owned": planned.owned_weights, "other": planned.sharded_weights}
    assert result["momentum"]["owned"] == planned.momentum
    assert result["second"]["owned"] == planned.second_moment
    assert result["adam"]["other"] == planned.adam
    assert result["gradients"] == {"owned": planned.owned_gradients, "other": planned.sharded_gradients}
    if result["gathered"]:  # on one shard rank FSDP2 copies and gathers nothing
        assert result["gathered"] == planned.gathered
    most = {"packed": planned.packed_gradients, "publish": planned.publish}
    # The token embedding's gradient is the last, when those of the largest block have left.
    embedding = VOCAB * DIM * (2 if half else 4)
    most |= {"unsharded": planned.unsharded, "local": planned.local_gradients - embedding}
    assert result["most"] == most


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64)])
def test_memory_of_an_update_is_what_the_optimizer_allocates(shape: tuple[int, int]) -> None:
    from dmuon_core import Muon

    matrix = nn.Parameter(torch.randn(shape))
    matrix.grad = torch.randn(shape)
    optimizer = Muon([matrix], lr=0.1, ns_dtype=torch.float32)
    optimizer.step()
    allocated = extra_bytes(optimizer.step)
    planned = update_bytes(MatrixSpec("w", shape, ""), 4)
    assert planned <= allocated <= planned + 1024  # norms, scalars


def measured() -> str:
    from dmuon_core.planning.measure import Probe, measure

    probe = Probe(widths=(16,), tokens=16, sequence=8, ns_dtype=torch.float32)
    return measure(probe, 1, torch.device("cpu")).to_json()


def test_the_measured_constants_make_a_hardware_file(tmp_path: Any) -> None:
    """Positive and complete; how large they are is the machine's business."""
    text = run_distributed(measured, 2)[0]
    (tmp_path / "machine.json").write_text(text)
    hardware = parse_hardware(str(tmp_path / "machine.json"))
    assert set(hardware.algorithms) == set(Kind)
    assert all(rate > 0 for rate in hardware.algorithms.values())
    assert hardware.flops[0][0] == hardware.ns_flops[0][0] == 16.0
    assert min(hardware.flops[0][1], hardware.ns_flops[0][1], hardware.memory, hardware.latency) > 0
    assert 0 <= hardware.overlap <= 1
    model, _ = build(False)
    assert step_times(place(shapes_of(model), Layout(2)), hardware, Work(16)).step > 0
