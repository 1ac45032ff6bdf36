"""DMuonFabricStrategy: loops that the user writes, each against the same loop in one process without Lightning."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dmuon_core
import dmuon_lightning
from dmuon_core import OwnedTensor, get_dedicated
from dmuon_lightning import DMuonFabricStrategy
from tests.distributed.harness import capture_error, run_distributed
from tests.distributed.reference import full, full_grads, full_weights
from tests.lightning import modules
from tests.lightning.runs import (
    GRAD_ATOL,
    LOSS_ATOL,
    WEIGHT_ATOL,
    assert_equal,
    assert_tensors_close,
    mean_losses,
    muon,
    one_process_muon,
    rank,
    world_size,
)
from tests.lightning.test_optimizers import NAMED


class Model(nn.Module):
    """A plain module, with a method beside its forward that needs its weights."""

    def __init__(self) -> None:
        super().__init__()
        modules.Net.build(self)  # type: ignore[arg-type]
        self.losses: list[float] = []

    forward = modules.Net.forward

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy((self(tokens) * self.scale.mean()).flatten(0, 1).float(), targets.flatten())


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def fabric(strategy: Any = None, **options: Any) -> Fabric:
    made = Fabric(accelerator="cpu", devices=world_size(), strategy=strategy or DMuonFabricStrategy(), **options)
    made.launch()
    return made


def _loss(net: Any, batch: list[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]).flatten(0, 1).float(), batch[1].flatten())


CLIPS: dict[str, dict[str, Any]] = {"": {}, "norm": {"max_norm": 0.5}, "value": {"clip_val": 0.002}}


def _one_process(window: int, clip: str) -> dict[str, Any]:
    net = model()
    optimizer = one_process_muon(net)
    norms = []
    for index, batch in enumerate(modules.loader()):
        loss = _loss(net, batch)
        (loss / window).backward()
        net.losses.append(loss.item())
        if (index + 1) % window == 0:
            if clip == "norm":
                norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
            elif clip == "value":
                nn.utils.clip_grad_value_(net.parameters(), 0.002)
            grads = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": net.losses, "norms": norms, "grads": grads, "weights": full_weights(net)}


def _train(how: str, window: int, clip: str, strategy: Any) -> dict[str, Any]:
    runner = fabric(strategy)
    net = model(seed=rank())  # rank 0's weights win
    wrapped: Any
    if how == "together":
        wrapped, optimizer = runner.setup(net, dmuon_lightning.Muon(net.parameters(), **_FLOAT32))
    elif how == "apart":
        early = dmuon_core.Muon(net, **_FLOAT32)
        wrapped = runner.setup_module(net)
        optimizer = runner.setup_optimizers(early)
    else:
        wrapped = runner.setup(net)
        optimizer = runner.setup_optimizers(muon(net))
    data: Any = runner.setup_dataloaders(modules.loader(), use_distributed_sampler=False)
    stats, norms, counts = get_dedicated(net).stats, [], []
    for index, batch in enumerate(data):
        is_last = (index + 1) % window == 0
        with runner.no_backward_sync(wrapped, enabled=not is_last):
            loss = _loss(wrapped, batch)
            runner.backward(loss / window)
        net.losses.append(loss.item())
        if is_last:
            if clip:
                norm = runner.clip_gradients(wrapped, optimizer, **CLIPS[clip])
                norms += [] if norm is None else [float(norm)]
            grads = {name: grad for name, grad in full_grads(net).items() if grad is not None}
            optimizer.step()
            optimizer.zero_grad()
            counts.append(stats.reduces)
    return {
        "losses": mean_losses(net),
        "norms": norms,
        "grads": grads,
        "weights": full_weights(net),
        "counts": counts,
        "owned": sum(isinstance(p, OwnedTensor) for p in net.parameters()),
    }


_FLOAT32 = {**NAMED, "ns_dtype": torch.float32}

LOOPS: list[tuple[str, int, str, Any]] = [
    ("together", 1, "", None),
    ("apart", 1, "norm", "dmuon"),
    ("module first", 2, "norm", "dmuon_z2"),
    ("together", 2, "value", None),
]


@cache
def _wanted(window: int, clip: str) -> dict[str, Any]:
    return run_distributed(_one_process, 1, window, clip, init=False)[0]


def _loops(strategy: dict[str, Any]) -> list[dict[str, Any]]:
    make = partial(DMuonFabricStrategy, **strategy)
    return [_train(how, window, clip, make() if strategy else name) for how, window, clip, name in LOOPS]


@pytest.mark.parametrize(
    ("world", "strategy"), [(2, {}), pytest.param(4, {"replicate_size": 2}, marks=pytest.mark.slow)]
)
def test_loops_equal_one_process(world: int, strategy: dict[str, Any]) -> None:
    for results in run_distributed(_loops, world, strategy):
        for (how, window, clip, _), got in zip(LOOPS, results, strict=True):
            want = _wanted(window, clip)
            assert got["owned"] == 7, how
            assert got["losses"] == pytest.approx(want["losses"], abs=LOSS_ATOL), how
            assert got["norms"] == pytest.approx(want["norms"], abs=LOSS_ATOL), how
            assert len(got["norms"]) == (4 // window if clip == "norm" else 0)
            assert_tensors_close(got["grads"], want["grads"], GRAD_ATOL)
            assert_tensors_close(got["weights"], want["weights"], WEIGHT_ATOL)
            # One communication of gradients for each window.
            assert len(got["counts"]) == 4 // window
            assert got["counts"] == [got["counts"][0] * (i + 1) for i in range(4 // window)]


def _sync_afterwards() -> list[bool]:
    """Gradients that arrive at their owners after each form of the block, also one that raises."""
    runner = fabric()
    net = model()
    wrapped: Any = runner.setup(net)
    batch = next(iter(modules.loader()))
    arrived = []

    def backward() -> None:
        net.zero_grad()
        runner.backward(_loss(wrapped, batch))
        arrived.append(all(p.grad is not None for p in net.parameters()))

    for enabled in (True, False):
        with runner.no_backward_sync(wrapped, enabled=enabled):
            backward()
        backward()
    assert capture_error(_raise_inside, runner, wrapped) is not None
    backward()
    with runner.no_backward_sync(wrapped), runner.no_backward_sync(wrapped):
        pass
    backward()
    return arrived


def _raise_inside(runner: Fabric, wrapped: Any) -> None:
    with runner.no_backward_sync(wrapped):
        raise ValueError("a user's mistake")


def test_synchronization_is_back_after_the_block() -> None:
    for arrived in run_distributed(_sync_afterwards, 2):
        assert arrived == [False, True, True, True, True, True]


def _saved(path: str, is_folder: bool) -> dict[str, Any]:
    """Train two steps, save, train two more."""
    net, optimizer, runner, wrapped = _ready(is_folder)
    batches = list(modules.loader())
    _steps(runner, wrapped, optimizer, batches[:2])
    runner.save(path, {"model": wrapped, "optimizer": optimizer, "step": 2, "note": "from the user"})
    half = {"weights": full_weights(net), "state": _state(net, optimizer)}
    _steps(runner, wrapped, optimizer, batches[2:])
    return {"half": half, "weights": full_weights(net), "state": _state(net, optimizer)}


def _loaded(path: str, is_folder: bool) -> dict[str, Any]:
    net, optimizer, runner, wrapped = _ready(is_folder, seed=7)
    state: dict[str, Any] = {"model": wrapped, "optimizer": optimizer, "step": 0}
    rest = runner.load(path, state)
    half = {"weights": full_weights(net), "state": _state(net, optimizer)}
    _steps(runner, wrapped, optimizer, list(modules.loader())[2:])
    found = {"half": half, "weights": full_weights(net), "state": _state(net, optimizer)}
    return {**found, "step": state["step"], "rest": rest}


def _ready(is_folder: bool, seed: int = 0) -> tuple[Any, Any, Fabric, Any]:
    runner = fabric(DMuonFabricStrategy(save_distributed_checkpoint=is_folder))
    net = model(seed)
    wrapped, optimizer = runner.setup(net, muon(net))
    return net, optimizer, runner, wrapped


def _steps(runner: Fabric, wrapped: Any, optimizer: Any, batches: list[Any]) -> None:
    for batch in batches:
        _step(runner, wrapped, optimizer, batch)


def _step(runner: Fabric, wrapped: Any, optimizer: Any, batch: Any) -> float:
    loss = _loss(wrapped, batch)
    runner.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _state(net: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    state = optimizer.optimizer.state
    named = {name: sorted(state[p].items()) for name, p in net.named_parameters() if p in state}
    return {f"{name}/{key}": full(torch.as_tensor(value)) for name, items in named.items() for key, value in items}


FORMATS = {"file": False, "folder": True}


@pytest.mark.parametrize(
    ("form", "before", "after", "strategy"),
    [
        ("file", 2, 2, "file"),
        ("folder", 2, 1, "folder"),
        pytest.param("file", 2, 2, "folder", marks=pytest.mark.slow),
        pytest.param("file", 4, 2, "file", marks=pytest.mark.slow),
        pytest.param("folder", 2, 2, "folder", marks=pytest.mark.slow),
        pytest.param("folder", 4, 2, "file", marks=pytest.mark.slow),
    ],
)
def test_save_and_load(form: str, before: int, after: int, strategy: str, tmp_path: Path) -> None:
    """Each form is read by a strategy that writes the other one, too."""
    path = str(tmp_path / "checkpoint")
    want = run_distributed(_saved, before, path, FORMATS[form])[0]
    assert Path(path).is_dir() == FORMATS[form]
    for got in run_distributed(_loaded, after, path, FORMATS[strategy]):
        assert (got["step"], got["rest"]) == (2, {"note": "from the user"})
        assert_equal(got["half"]["weights"], want["half"]["weights"])
        assert_equal(got["half"]["state"], want["half"]["state"])
        if before == after:
            assert_equal(got["weights"], want["weights"])
            assert_equal(got["state"], want["state"])
        else:
            assert_tensors_close(got["weights"], want["weights"], WEIGHT_ATOL)


def _raw(path: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A file that a plain script has written, and one for a plain script to read."""
    plain = model(seed=3)
    if rank() == 0:
        torch.save(plain.state_dict(), path)
    torch.distributed.barrier()
    runner = fabric()
    net = model(seed=0)
    wrapped = runner.setup(net)
    runner.load_raw(path, wrapped)
    runner.save(path + ".saved", {"model": wrapped})
    return full_weights(net), dict(plain.state_dict())


def test_load_raw_and_a_file_for_a_plain_script(tmp_path: Path) -> None:
    path = str(tmp_path / "plain.pt")
    for got, want in run_distributed(_raw, 2, path):
        assert_equal(got, want)
        plain = model()
        plain.load_state_dict(torch.load(path + ".saved")["model"])
        assert_equal(dict(plain.state_dict()), want)


def _forms() -> dict[str, Any]:
    found: dict[str, Any] = {}
    runner = fabric()
    with runner.init_module(empty_init=True):
        net = model()
    assert all(p.is_meta for p in net.parameters())
    net.reset_parameters = lambda: (nn.init.ones_(net.scale), nn.init.zeros_(net.turn))  # type: ignore[assignment]
    wrapped: Any = runner.setup(net)
    found["from meta"] = full_weights(net)

    for precision in ("bf16-true", "bf16-mixed"):
        runner = fabric(precision=precision)
        net = model()
        wrapped, optimizer = runner.setup(net, muon(net))
        losses = [_step(runner, wrapped, optimizer, batch) for batch in list(modules.loader()) * 2]
        dtypes = {p.dtype for p in net.parameters() if isinstance(p, OwnedTensor)}, net.scale.dtype
        found[precision] = (*dtypes, losses[-1] < losses[0] - 0.2)

    net = model()
    wrapped = fabric().setup(net)
    wrapped.mark_forward_method("loss")
    tokens, targets = next(iter(DataLoader(modules.dataset(), 8)))
    found["method"] = wrapped.loss(tokens, targets).item(), model().loss(tokens, targets).item()

    net = model()
    wrapped = fabric().setup(torch.compile(net, backend="eager"))
    found["compiled"] = _loss(wrapped, [tokens, targets]).item(), _loss(model(), [tokens, targets]).item()
    return found


def test_other_ways_to_make_a_module() -> None:
    for got in run_distributed(_forms, 2):
        assert torch.equal(got["from meta"]["scale"], torch.ones(modules.WIDTH))
        assert got["from meta"]["blocks.0.up.weight"].abs().max() <= modules.WIDTH**-0.5
        assert got["bf16-true"] == ({torch.float32}, torch.bfloat16, True)
        assert got["bf16-mixed"] == ({torch.float32}, torch.float32, True)
        for name in ("method", "compiled"):
            assert got[name][0] == pytest.approx(got[name][1], abs=LOSS_ATOL), name


def _nonfinite() -> dict[str, Any]:
    runner = fabric()
    net = model()
    wrapped, optimizer = runner.setup(net, muon(net))
    runner.backward(_loss(wrapped, next(iter(modules.loader()))))
    owned = net.blocks[0].up.weight
    assert isinstance(owned.grad, OwnedTensor)
    if owned.grad.is_owner:
        owned.grad._local_tensor[0, 0] = float("inf")
    before = full_grads(net)
    error = capture_error(runner.clip_gradients, wrapped, optimizer, max_norm=1.0)
    after = full_grads(net)
    norm = runner.clip_gradients(wrapped, optimizer, max_norm=1.0, error_if_nonfinite=False)
    return {"error": error, "before": before, "after": after, "norm": float(norm)}  # type: ignore[arg-type]


def test_a_norm_that_is_not_finite_is_an_error_on_every_rank() -> None:
    for got in run_distributed(_nonfinite, 2):
        assert got["error"].type == "RuntimeError" and "error_if_nonfinite=False" in got["error"]
        assert_equal(got["after"], got["before"])
        assert got["norm"] == float("inf")


def _optimizer_before_module() -> None:
    runner = fabric()
    runner.setup(model())  # another one, whose parameters the optimizer does not hold
    net = model()
    optimizer = runner.setup_optimizers(dmuon_lightning.Muon(net.parameters(), **_FLOAT32))
    wrapped = runner.setup_module(net)
    _step(runner, wrapped, optimizer, next(iter(modules.loader())))


def _mistakes() -> dict[str, str]:
    def message(call: Any, *args: Any, **kwargs: Any) -> str:
        error = capture_error(call, *args, **kwargs)
        return f"{error.type}: {error.message}" if error else ""

    sharded = model()
    torch.distributed.fsdp.fully_shard(sharded.blocks[0])
    return {
        "sharded": message(fabric().setup, sharded),
        "precision": message(fabric, "dmuon", precision="64-true"),
        "size": message(fabric, DMuonFabricStrategy(replicate_size=3)),
        "order": message(_optimizer_before_module),
    }


def test_mistakes() -> None:
    for said in run_distributed(_mistakes, 2):
        assert said["sharded"].startswith("ValueError: 'blocks.0.")
        assert "does not support" in said["precision"] and "precision='64-true'" in said["precision"]
        assert "replicate_size=3" in said["size"]
        assert said["order"].startswith("RuntimeError: Muon holds 'turn' from before")
