"""The Muon update of the matrices that this rank owns: momentum, orthogonalization in batches, decay, step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from dmuon_core.optim import newton_schulz
from dmuon_core.optim.local import is_stepped_here, local, zeros_for_state
from dmuon_core.optim.normuon import lerp, normalize_neurons
from dmuon_core.optim.split import Split, parse_split

AdjustLrFn = Literal["original", "match_rms_adamw", "none"]

MOMENTUM, SECOND = "momentum_buffer", "second_momentum_buffer"
#: Kept as names in groups: checkpoint tools carry numbers and strings, not dtypes.
NS_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in newton_schulz.DTYPES}
_STEP_OPTIONS = (
    "lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "ns_form",
    "batched", "maximize", "cautious_weight_decay", "beta2",
)  # fmt: skip
#: Numbers that schedules change. What is compiled takes them as tensors: a number would be compiled in.
_CHANGING = ("lr", "weight_decay", "momentum", "beta2")
#: Kinds of windows (shapes, options) that are compiled; by default torch goes on without compiling after 8.
_MOST_COMPILED = 1024
#: Elements whose updates are held at once. It bounds the memory of a batch, and new weights leave window by window.
_WINDOW = 2**26


def split_of(group: dict[str, Any], position: int) -> Split:
    """How the parameter at ``position`` of a Muon group is divided. Local."""
    specs = group.get("split")
    return parse_split(specs[position] if specs else None, tuple(group["params"][position].shape))


def state_shapes(group: dict[str, Any], position: int) -> dict[str, tuple[int, ...]]:
    """Global shape of every state tensor of a parameter that is not the parameter's own. Local."""
    return {SECOND: split_of(group, position).row_shape} if group["algorithm"] == "muon" else {}


def muon_state(group: dict[str, Any], position: int) -> dict[str, Tensor]:
    """State of a matrix before its first step. Local."""
    p = group["params"][position]
    state = {MOMENTUM: zeros_for_state(p)}
    if group["normuon"]:
        state[SECOND] = zeros_for_state(p, split_of(group, position).row_shape)
    return state


@dataclass
class Matrix:
    """One owned parameter in a step: local tensors, written in place."""

    weight: Tensor
    grad: Tensor
    average: Tensor
    second: Tensor | None
    split: Split


def muon_update(group: dict[str, Any], state: Any, *updated: Callable[[Tensor], None]) -> None:
    """Step every matrix of one Muon group that has a gradient; in place, local, no collective of its own.

    ``M = momentum * M + (1 - momentum) * G``, the update is the orthogonalized ``M`` (with nesterov,
    ``(1 - momentum) * G + momentum * M``), and weight decay is decoupled. A rank that holds no rows of a
    matrix keeps its empty momentum and computes nothing. Every rank calls each of ``updated`` with every
    parameter of the group, in order, when it is done with it.
    """
    step = _compiled() if group["compile"] else step_window
    for window in _windows(group, state):
        matrices = [matrix for _, matrix in window if matrix is not None]
        if matrices:
            with _no_autocast(matrices[0].weight.device.type), _more_compiled(group["compile"]):
                step(matrices, **_options(group, matrices[0].weight.device))
        for p, _ in window:
            for call in updated:
                call(p)


def _windows(group: dict[str, Any], state: Any) -> Iterator[list[tuple[Tensor, Matrix | None]]]:
    """The group's parameters in order, cut where what this rank steps exceeds the window."""
    window: list[tuple[Tensor, Matrix | None]] = []
    size = 0
    for position, p in enumerate(group["params"]):
        matrix = _matrix(group, position, state)
        numel = 0 if matrix is None else matrix.weight.numel()
        if numel and size and (size + numel > _WINDOW or not group["batched"]):
            yield window
            window, size = [], 0
        window.append((p, matrix))
        size += numel
    yield window


def _matrix(group: dict[str, Any], position: int, state: Any) -> Matrix | None:
    p = group["params"][position]
    if p.grad is None:
        return None
    split = split_of(group, position)
    if MOMENTUM not in state[p] or (group["normuon"] and SECOND not in state[p]):
        state[p].update({**muon_state(group, position), **state[p]})
    if not is_stepped_here(p) or local(p).numel() == 0:
        return None
    second = local(state[p][SECOND]) if group["normuon"] else None
    return Matrix(local(p), local(p.grad), local(state[p][MOMENTUM]), second, split)


def _options(group: dict[str, Any], device: torch.device) -> dict[str, Any]:
    options = {name: group[name] for name in _STEP_OPTIONS}
    for name in _CHANGING:
        if isinstance(options[name], Tensor):
            options[name] = options[name].reshape(())
        elif group["compile"]:
            options[name] = torch.tensor(options[name], dtype=torch.float64)
    # A dtype, if it was written into the group later.
    return {**options, "ns_dtype": NS_DTYPES[str(group["ns_dtype"]).removeprefix("torch.")]}


def step_window(
    matrices: list[Matrix],
    *,
    lr: float | Tensor,
    weight_decay: float | Tensor,
    momentum: float | Tensor,
    nesterov: bool,
    ns_coefficients: Any,
    eps: float,
    ns_steps: int,
    ns_dtype: torch.dtype,
    ns_form: newton_schulz.Form,
    adjust_lr_fn: AdjustLrFn | None,
    batched: bool,
    maximize: bool,
    cautious_weight_decay: bool,
    beta2: float | Tensor,
) -> None:
    """Step matrices with the hyper-parameters of one group; writes weights and state in place. Local."""
    pieces: list[_Piece] = []
    for matrix in matrices:
        grad = -matrix.grad if maximize else matrix.grad
        if isinstance(momentum, Tensor):
            matrix.average.copy_(lerp(matrix.average, grad, 1 - momentum))
        else:
            matrix.average.lerp_(grad, 1 - momentum)
        update = lerp(grad, matrix.average, momentum) if nesterov else matrix.average
        split = matrix.split
        seconds = split.row_values(matrix.second) if matrix.second is not None else [None] * len(split.sizes)
        for weight, part, second in zip(split.pieces(matrix.weight), split.pieces(update), seconds, strict=True):
            pieces.append(_Piece(weight, split.matrices(part), second))
    for batch in _batches(pieces) if batched else ([piece] for piece in pieces):
        g = batch[0].update if len(batch) == 1 else torch.cat([_as_batch(piece.update) for piece in batch])
        # Stacked experts stay one batch unless every matrix is to be computed as if it were alone.
        singles = [g] if batched or g.ndim == 2 else list(g)
        done = [
            newton_schulz.orthogonalize(one, ns_coefficients, ns_steps, eps, ns_dtype, form=ns_form) for one in singles
        ]
        result = done[0] if len(done) == 1 else torch.stack(done)
        result = result.reshape(g.shape)
        sizes = [_as_batch(piece.update).shape[0] for piece in batch]
        parts = [result] if len(batch) == 1 else result.split(sizes)
        for piece, part in zip(batch, parts, strict=True):
            piece.apply(part, lr, weight_decay, adjust_lr_fn, cautious_weight_decay, beta2)


@dataclass
class _Piece:
    """A matrix, or a stack of experts, with what is written after it was orthogonalized."""

    weight: Tensor  # a view into the parameter, in its own dimensions
    update: Tensor  # [m, n] or [E, m, n]
    second: Tensor | None

    def apply(
        self,
        update: Tensor,
        lr: float | Tensor,
        weight_decay: float | Tensor,
        adjust_lr_fn: AdjustLrFn | None,
        cautious: bool,
        beta2: float | Tensor,
    ) -> None:
        update = update.reshape(self.update.shape)
        if self.second is not None:
            update, second = normalize_neurons(update, self.second.reshape(*update.shape[:-1], 1), beta2)
            self.second.copy_(second.reshape(self.second.shape))
        weight = self.weight
        scale = update_scale(update.shape[-2:], adjust_lr_fn)
        update = update.reshape(weight.shape)
        if cautious:
            _add(weight, weight * (update * weight >= 0), -(lr * weight_decay))
        else:
            weight.mul_(1 - lr * weight_decay)
        _add(weight, update, -(lr * scale))


def _add(weight: Tensor, update: Tensor, factor: float | Tensor) -> None:
    if isinstance(factor, Tensor) and torch.compiler.is_compiling():
        weight.add_(update.to(weight.dtype) * factor)  # `alpha` takes numbers: it would read the tensor
    else:
        weight.add_(update, alpha=factor)  # type: ignore[arg-type]


def _batches(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Pieces of equal matrix shape, dtype and device, in order of first appearance."""
    batches: dict[tuple[Any, ...], list[_Piece]] = {}
    for piece in pieces:
        key = (*piece.update.shape[-2:], piece.update.dtype, piece.update.device)
        batches.setdefault(key, []).append(piece)
    return list(batches.values())


def _as_batch(update: Tensor) -> Tensor:
    return update if update.ndim == 3 else update.unsqueeze(0)


def update_scale(shape: tuple[int, ...] | torch.Size, adjust_lr_fn: AdjustLrFn | None) -> float:
    """Factor on the learning rate of a matrix of ``shape``, flattened to ``[m, n]``, with ``m, n >= 1``.

    "original" and None: ``sqrt(max(1, m / n))`` (Jordan); "match_rms_adamw": ``0.2 * sqrt(max(m, n))``, which
    gives updates the root mean square of AdamW's (arXiv:2502.16982, eq. 4); "none": 1.
    """
    m, n = shape[0], math.prod(shape[1:])
    if adjust_lr_fn == "none":
        return 1.0
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    return math.sqrt(max(1, m / n))


@cache
def _compiled() -> Callable[..., None]:
    return torch.compile(step_window, dynamic=False)


def _more_compiled(compiles: bool) -> AbstractContextManager[Any]:
    if not compiles:
        return nullcontext()
    import torch._dynamo  # compiling imports it anyway, and it takes seconds

    limits: dict[str, Any] = {"recompile_limit": _MOST_COMPILED, "accumulated_recompile_limit": _MOST_COMPILED}
    return torch._dynamo.config.patch(**limits)


def _no_autocast(device_type: str) -> AbstractContextManager[Any]:
    # A step taken inside an autocast region would otherwise run a float32 Newton-Schulz in the autocast
    # dtype.
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
