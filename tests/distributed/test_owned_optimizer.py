"""OwnedOptimizer with optimizers of other packages: training equals one process, and checkpoints fit any layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._pytree import tree_map

from dmuon_core import OwnedOptimizer, OwnedTensor, check_invariants, clip_grad_norm_, no_sync
from tests.distributed.counting import CountCollectives
from tests.distributed.harness import run_distributed
from tests.distributed.models import MODELS
from tests.distributed.reference import Rows, assert_close, dedicate, full, full_weights

STEPS = 4


def soap(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
    # Eigenbases are chosen anew at every second step. Sides longer than the rank of a gradient get none: rounding would
    # choose the basis of the rest.
    return pytorch_optimizer.SOAP(params, lr=3e-3, precondition_frequency=2, eps=1e-4, max_precondition_dim=10)


def shampoo(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
    return pytorch_optimizer.Shampoo(params, lr=1e-2, momentum=0.5, matrix_eps=1e-3, weight_decay=0.01)


def stock_muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """With a group of its own for tall matrices."""
    tall = [p for p in params if p.shape[0] > p.shape[1]]
    rest = [p for p in params if p.shape[0] <= p.shape[1]]
    return torch.optim.Muon([{"params": tall, "lr": 0.01}, {"params": rest}], lr=0.02)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3, betas=(0.9, 0.95), eps=1e-4)


MATRIX: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "muon": stock_muon,
    "soap": soap,
    "shampoo": shampoo,
}
# What rounding of gradients, 1e-7, becomes in four steps. Stock Newton-Schulz works in bfloat16, where it turns the
# last bit of a product now and then: up to 1e-1 of an update. Eigenbases and inverse roots multiply it by up to 100.
ATOL = {"muon": 4e-3, "soap": 1e-4, "shampoo": 1e-4}


class Apart(torch.optim.Optimizer):
    """The optimizers on a plain model, one for the same matrices and one for the rest, without this library."""

    def __init__(self, model: nn.Module, name: str) -> None:
        named = list(model.named_parameters())
        matrices = [p for fqn, p in named if p.ndim == 2 and "blocks." in fqn]
        self.parts = [MATRIX[name](matrices), adamw([p for _, p in named if not any(p is q for q in matrices)])]
        super().__init__([p for _, p in named], {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


def build(name: str, replicas: int = 0) -> tuple[nn.Module, OwnedOptimizer]:
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    if dist.is_initialized():
        dedicate(model, default_targets=True, replicas=replicas)
    return model, OwnedOptimizer(model, MATRIX[name], adamw)


def plain(name: str) -> tuple[nn.Module, Apart]:
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    return model, Apart(model, name)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """Forward, backward, clipping, step and a scheduler; the final weights."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    for step in range(STEPS):
        Rows("gpt", step, 0, rank, world).loss(model).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return full_weights(model)


def feed(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, Tensor]:
    """Steps with given gradients, the same in every layout; the final weights. One matrix has none in step 1."""
    for step in steps:
        rng = torch.Generator().manual_seed(step)
        for name, p in model.named_parameters():
            whole_grad = torch.randn(p.shape, generator=rng)
            if step == 1 and name == "blocks.1.attn.q.weight":
                p.grad = None
            elif isinstance(p, OwnedTensor):
                p.grad = p.at_home(whole_grad if p.is_home else whole_grad[:0])
            elif isinstance(p, DTensor):
                p.grad = distribute_tensor(whole_grad, p.device_mesh, p.placements, src_data_rank=None)
            else:
                p.grad = whole_grad
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


def whole(state: Any) -> Any:
    return tree_map(lambda leaf: full(leaf) if isinstance(leaf, Tensor) else leaf, state)


def _train_and_save(folder: str) -> dict[str, Any]:
    results = {}
    for name in MATRIX:
        trained = train(*build(name), dist.get_rank(), dist.get_world_size())
        model, optimizer = build(name)
        with CountCollectives() as counted:
            feed(model, optimizer, range(0))  # nothing but the gathering of weights at the end
            gathering = counted.calls.total()
            fed = feed(model, optimizer, range(STEPS))
        assert counted.calls.total() == 2 * gathering, "a step took a collective"
        state = get_optimizer_state_dict(model, optimizer)
        dcp.save({"m": model.state_dict(), "o": state}, checkpoint_id=f"{folder}/{name}")
        results[name] = (trained, fed, whole(state["state"]), state["param_groups"])
    return results


def _resume(folder: str, replicas: int, options: dict[str, Any]) -> dict[str, Any]:
    results = {}
    for name in MATRIX:
        model, optimizer = build(name, replicas)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)  # what was not loaded would show
        state = {"m": model.state_dict(), "o": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        model.load_state_dict(state["m"])
        set_optimizer_state_dict(model, optimizer, state["o"])
        if options:
            # Through full tensors on rank 0 and back, as one-file checkpoints go.
            dict_options = StateDictOptions(**options)
            one_file = get_optimizer_state_dict(model, optimizer, options=dict_options)
            set_optimizer_state_dict(model, optimizer, one_file, options=dict_options)
        results[name] = feed(model, optimizer, range(STEPS, 2 * STEPS))
        if replicas:
            check_invariants(model)
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    pytest.importorskip("pytorch_optimizer")
    folder = str(tmp_path_factory.mktemp("owned"))
    return folder, run_distributed(_train_and_save, 2, folder)


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor], what: str) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == [], what


@pytest.mark.parametrize("name", MATRIX)
def test_equals_one_process(saved, name):
    trained_alone, fed_alone = train(*plain(name)), feed(*plain(name), range(STEPS))
    for rank, outcome in enumerate(saved[1]):
        trained, fed, _, _ = outcome[name]
        assert_close(trained, trained_alone, ATOL[name], f"{name} on rank {rank}")
        assert_equal(fed, fed_alone, "bit for bit with the same gradients")
    torch.manual_seed(0)
    start = dict(MODELS["gpt"]().named_parameters())
    for fqn, weight in trained_alone.items():
        if "blocks." in fqn and weight.ndim == 2:
            assert (weight - start[fqn]).abs().max() > 2 * ATOL[name]


@pytest.mark.parametrize("name", MATRIX)
def test_the_state_is_that_of_the_optimizers_on_every_rank(saved, name):
    model, alone = plain(name)
    feed(model, alone, range(STEPS))
    for _, _, state, groups in (outcome[name] for outcome in saved[1]):
        for fqn, p in model.named_parameters():
            expected = next(part.state[p] for part in alone.parts if p in part.state)
            # An empty list would be lost by checkpoint tools; in the checkpoint an empty tensor stands for it.
            shown = tree_map(
                lambda x: torch.empty(0, 1) if x == [] else x,
                dict(expected),
                is_leaf=lambda x: type(x) is list and not x,
            )
            torch.testing.assert_close(state[fqn], shown, rtol=0, atol=0)
        for group, expected in zip(groups, alone.param_groups, strict=True):
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            assert options == {key: value for key, value in expected.items() if key != "params"}


@pytest.mark.parametrize(
    ("world", "replicas", "options"),
    [
        (4, 2, {}),
        pytest.param(1, 0, {}, marks=pytest.mark.slow),
        pytest.param(2, 0, {"full_state_dict": True, "broadcast_from_rank0": True}, marks=pytest.mark.slow),
    ],
)
def test_resumes_in_any_layout(saved, world, replicas, options):
    """With gradients that are the same everywhere: bit for bit, but for SOAP. The QR decomposition leaves eigenbases in
    memory column by column; loaded ones lie row by row, and their products differ in the last bit."""
    outcomes = run_distributed(_resume, world, saved[0], replicas, options)
    for name in MATRIX:
        want = feed(*plain(name), range(2 * STEPS))
        for outcome in outcomes:
            assert_close(outcome[name], want, 1e-6 if name == "soap" else 0.0, name)


class Peculiar(torch.optim.Optimizer):
    """SGD that makes its state ahead, puts new memory into parameters, and changes gradients in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.t_()
                self.state[p]["sum"] += p.grad.t()
                p.data = p.data - self.param_groups[0]["lr"] * self.state[p]["sum"]


class Opaque(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["helper"] = Opaque


def _corners() -> None:
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    dedicate(model, default_targets=True)
    optimizer = OwnedOptimizer(model, Peculiar, adamw)
    copies = {name: nn.Parameter(full(p)) for name, p in model.named_parameters()}
    matrices = [copies[name] for name, p in model.named_parameters() if isinstance(p, OwnedTensor)]
    alone = Peculiar(matrices)
    for p, twin in zip(model.parameters(), copies.values(), strict=True):
        if isinstance(p, OwnedTensor):
            assert optimizer.state[p].keys() == ({"sum"} if p.is_home else set())
            twin.grad = torch.full_like(twin, 0.5)
            p.grad = p.at_home(twin.grad.clone() if p.is_home else twin.grad[:0])
    for _ in range(2):
        optimizer.step()
        alone.step()
        for p in matrices:  # a stock optimizer leaves them transposed
            p.grad = torch.full_like(p, 0.5)
    for p, twin in zip(model.parameters(), copies.values(), strict=True):
        assert not isinstance(p, OwnedTensor) or torch.equal(full(p), twin)
        assert not isinstance(p, OwnedTensor) or p.grad._local_tensor.shape[1:] == p.shape[1:]

    spoiled = next(p for p in model.parameters() if isinstance(p, OwnedTensor))
    before = full_weights(model)
    other = next(p for p in model.parameters() if not isinstance(p, OwnedTensor))
    other.grad = torch.sparse_coo_tensor(size=other.shape)
    with pytest.raises(RuntimeError, match=r"parameter 'tok_emb.weight': its gradient is sparse.*No parameter"):
        optimizer.step()
    other.grad = None
    assert_equal(full_weights(model), before, "a refused step")
    spoiled.grad = distribute_tensor(torch.zeros(spoiled.shape), spoiled.device_mesh, [Replicate()])
    with pytest.raises(RuntimeError, match=r"OwnedOptimizer: parameter 'blocks\.0\..*: its gradient.*No parameter"):
        optimizer.step()
    assert_equal(full_weights(model), before, "a refused step")

    opaque = OwnedOptimizer(model, Opaque, adamw)
    spoiled.grad = None
    opaque.step()
    with pytest.raises(TypeError, match=r"the state of 'blocks\.0\..*holds type, and checkpoints carry only tensors"):
        opaque.state_dict()


def test_peculiar_optimizers_and_errors_on_every_rank():
    run_distributed(_corners, 2)


@pytest.mark.parametrize(
    ("matrix", "other", "message"),
    [
        (stock_muon, None, r"pass other=lambda params: .* for 'tok_emb.weight' and \d+ more"),
        (
            lambda ps: torch.optim.Muon(ps[1:]),
            adamw,
            r"Muon must hold exactly the 18 parameters.*leaves out \['blocks.0",
        ),
        (lambda ps: torch.optim.Muon([*ps, nn.Parameter(torch.zeros(2, 2))]), adamw, "but holds 19"),
        (stock_muon, lambda ps: adamw(ps[:-1]), "AdamW must hold exactly"),
    ],
)
def test_incomplete_optimizers_are_refused(matrix, other, message):
    with pytest.raises(ValueError, match=message):
        OwnedOptimizer(MODELS["gpt"](), matrix, other)


class NeedsLoss(torch.optim.SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        raise NotImplementedError


class MySAM(torch.optim.SGD):
    pass


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, NeedsLoss, MySAM])
@pytest.mark.parametrize("as_other", [False, True])
def test_optimizers_that_run_the_model_are_refused(kind, as_other):
    with pytest.raises(
        ValueError, match=f"{kind.__name__} runs forward and backward inside its step.*use an optimizer"
    ):
        OwnedOptimizer(MODELS["gpt"](), stock_muon if as_other else kind, kind if as_other else adamw)


class Embedded(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4, sparse=sparse)
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.head = nn.Linear(4, 3, bias=False)
        self.head.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.blocks[0](self.emb(x)))).square().mean()


@pytest.mark.parametrize(
    ("other", "sparse", "said"),
    [
        (torch.optim.AdamW, True, "its gradient is sparse.*sparse=False"),
        (torch.optim.RMSprop, True, "its gradient is sparse.*sparse=False"),
        (torch.optim.SparseAdam, False, "its gradient is dense, and SparseAdam takes only sparse ones"),
        (torch.optim.SparseAdam, True, None),
        (torch.optim.Adagrad, True, None),
        (torch.optim.SGD, True, None),
        (torch.optim.SGD, False, None),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # Adagrad's
def test_gradients_of_other_parameters_are_checked_before_any_step(other, sparse, said):
    torch.manual_seed(0)
    model = Embedded(sparse)
    optimizer = OwnedOptimizer(model, torch.optim.Muon, lambda ps: other(ps, lr=0.1))
    model(torch.tensor([0, 3])).backward()
    before = full_weights(model)
    if said is None:
        optimizer.step()
        assert [name for name, w in full_weights(model).items() if torch.equal(w, before[name])] == ["head.weight"]
    else:
        with pytest.raises(RuntimeError, match=f"parameter 'emb.weight': {said}.*No parameter was updated"):
            optimizer.step()
        assert_equal(full_weights(model), before, "a refused step")
        assert not any(optimizer.state.values())


class Ordered(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names}) for _ in "12")
        self.head = nn.Linear(4, 3, bias=False)


def test_state_of_parameters_with_other_names_is_refused():
    models = [Ordered("a", "b"), Ordered("b", "a"), Ordered("a", "b")]

    def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    saved, other, same = (OwnedOptimizer(model, momentum, momentum) for model in models)
    for name, p in models[0].named_parameters():
        p.grad = torch.full_like(p, 1.0 if ".a." in name else 2.0)
    saved.step()
    state = saved.state_dict()
    with pytest.raises(
        ValueError, match=r"OwnedOptimizer: parameter group 0 was saved with other parameters: 'blocks.0"
    ):
        other.load_state_dict(state)
    assert not any(other.state.values())
    by_name = get_optimizer_state_dict(models[0], saved)
    with pytest.raises(ValueError, match="was saved with other parameters"):
        other.load_state_dict(by_name)  # goes by position
    set_optimizer_state_dict(models[1], other, by_name)
    assert (other.state[models[1].blocks[0]["a"].weight]["momentum_buffer"] == 1).all()
    same.load_state_dict(state)
    assert (same.state[models[2].blocks[0]["b"].weight]["momentum_buffer"] == 2).all()
    for group in state["param_groups"]:
        del group["param_names"]
    other.load_state_dict(state)  # by position, as asked for
    assert (other.state[models[1].blocks[0]["b"].weight]["momentum_buffer"] == 1).all()


def test_on_a_plain_model():
    model, optimizer = build("muon")
    twin, alone = plain("muon")
    assert_equal(feed(model, optimizer, range(STEPS)), feed(twin, alone, range(STEPS)), "weights")
    resumed, loaded = build("muon")
    resumed.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    more = range(STEPS, STEPS + 2)
    assert_equal(feed(resumed, loaded, more), feed(model, optimizer, more), "resumed")
    with pytest.raises(NotImplementedError, match="build a new one"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    with pytest.raises(ValueError, match="Embedding has no matrix to train"):
        OwnedOptimizer(nn.Embedding(3, 3), stock_muon, adamw)


def test_the_closure_runs_once_with_gradients():
    model, optimizer = build("muon")
    calls = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = Rows("gpt", 0, 0, 0, 1).loss(model)
        loss.backward()
        calls.append(loss)
        return loss

    before = full_weights(model)
    assert optimizer.step(closure) is calls[0] and len(calls) == 1
    after = full_weights(model)
    assert all(not torch.equal(after[name], before[name]) for name in ("tok_emb.weight", "blocks.0.attn.q.weight"))


def look(model: nn.Module, optimizer: OwnedOptimizer) -> None:
    """Asks for a checkpoint's state, which must change nothing."""
    weights = full_weights(model)
    grads = {id(p): p.grad for p in model.parameters()}
    options = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.matrix.param_groups])
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert_equal(full_weights(model), weights, "weights")
    assert all(p.grad is grads[id(p)] for p in model.parameters())
    for group, before in zip(optimizer.matrix.param_groups, options, strict=True):
        # A count that the first step adds is there, so that one can be loaded.
        assert {"step": 0, **before} == {"step": 0, **{k: v for k, v in group.items() if k != "params"}}
    for fqn in dict(model.named_parameters()):
        assert state[fqn], fqn
        assert not full(torch.as_tensor(state[fqn].get("step", 0))).any()
        for key in ("exp_avg", "exp_avg_sq", "sum"):
            assert key not in state[fqn] or not full(state[fqn][key]).any()


class Ahead(Peculiar):
    """Of this one alone there is state before the first step."""


def _look_before_the_first_step() -> None:
    for make in (*MATRIX.values(), Ahead):
        runs = []
        for looks in (False, True):
            torch.manual_seed(0)
            model = MODELS["gpt"]()
            dedicate(model, default_targets=True)
            optimizer = OwnedOptimizer(model, make, adamw)
            rank, world = dist.get_rank(), dist.get_world_size()
            if looks:
                look(model, optimizer)
                torch.manual_seed(1)
            with no_sync(model):
                Rows("gpt", 9, 0, rank, world).loss(model).backward()
            if looks:
                look(model, optimizer)
            Rows("gpt", 8, 0, rank, world).loss(model).backward()
            if looks:
                look(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            trained, saved = train(model, optimizer, rank, world), optimizer.state_dict()
            runs.append((trained, whole(saved["state"]), saved["param_groups"]))
        assert_equal(runs[1][0], runs[0][0], f"{make.__name__}: weights")
        torch.testing.assert_close(runs[1][1], runs[0][1], rtol=0, atol=0)
        assert runs[1][2] == runs[0][2]


def test_a_look_before_the_first_step_changes_nothing():
    pytest.importorskip("pytorch_optimizer")
    run_distributed(_look_before_the_first_step, 2)


def _load_into_a_fresh_one(folder: str) -> None:
    """State that one of two optimizers makes ahead must not hide that of the other."""
    results = []
    for resumed in ("", "set", "in place"):
        torch.manual_seed(0)
        model = MODELS["gpt"]()
        dedicate(model, default_targets=True)
        optimizer = OwnedOptimizer(model, Ahead, adamw)
        if not resumed:
            feed(model, optimizer, range(2))
            state = {"m": model.state_dict(), "o": get_optimizer_state_dict(model, optimizer)}
            dcp.save(state, checkpoint_id=folder)
        else:
            state = {"m": model.state_dict(), "o": get_optimizer_state_dict(model, optimizer)}
            dcp.load(state, checkpoint_id=folder)
            model.load_state_dict(state["m"])
            if resumed == "set":
                set_optimizer_state_dict(model, optimizer, state["o"])
        results.append(feed(model, optimizer, range(2, 4)))
    assert_equal(results[1], results[0], "resumed")
    # Tensors were loaded into the state itself, which the first step then must not drop.
    assert_equal(results[2], results[0], "resumed in place")


def test_state_made_ahead_does_not_hide_that_of_the_other(tmp_path):
    run_distributed(_load_into_a_fresh_one, 2, str(tmp_path))


class Wordy(Peculiar):
    """Keeps strings in its state, alone and nested."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                words = self.state[p].setdefault("words", ("ab", ["cd,e"], {"f": "gh"}))
                assert words == ("ab", ["cd,e"], {"f": "gh"})
                self.state[p]["word"] = "s"
        super().step()


def kron(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return pytest.importorskip("pytorch_optimizer").Kron(params, lr=1e-3)  # keeps the equations of its einsums


def _strings(folder: str) -> None:
    for make in (Wordy, kron):
        found = []
        for resumed in (False, True):
            torch.manual_seed(0)
            model = MODELS["gpt"]()
            dedicate(model, default_targets=True)
            optimizer = OwnedOptimizer(model, make, adamw)
            if not resumed:
                feed(model, optimizer, range(2))
            state = {"o": get_optimizer_state_dict(model, optimizer)}
            if not resumed:
                dcp.save(state, checkpoint_id=f"{folder}/{make.__name__}")
            else:
                dcp.load(state, checkpoint_id=f"{folder}/{make.__name__}")
                set_optimizer_state_dict(model, optimizer, state["o"])
            found.append([copy.deepcopy(dict(optimizer.matrix.state[p])) for p in optimizer.matrix.state])
            assert found[0]
            feed(model, optimizer, range(2, 4))
        for before, after in zip(*found, strict=True):
            assert before.keys() == after.keys()
            for key, value in before.items():
                same = torch.equal(value, after[key]) if isinstance(value, Tensor) else str(value) == str(after[key])
                assert same, (make.__name__, key)


def test_strings_in_the_state_come_back(tmp_path):
    pytest.importorskip("pytorch_optimizer")
    run_distributed(_strings, 2, str(tmp_path))
