"""QK-clip: keep attention logits below a threshold by scaling query and key weights after the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dmuon_core.optim.local import is_stepped_here, local
from dmuon_core.owned_tensor import OwnedTensor


@dataclass(frozen=True)
class QKLayer:
    """Where the query and key heads of one attention layer are: rows of which parameters.

    Attributes:
        query: name of the query weight, or names (weight and bias); head ``h`` is ``head_dim`` rows from
            ``query_start + h * head_dim`` on.
        key: the same for keys; may be the same parameter, if they are fused.
        heads: number of query heads.
        key_heads: number of key heads, of which each serves ``heads / key_heads`` query heads in a row; by default
            ``heads``.
        head_dim: rows of a head; by default all rows of ``query`` divided by ``heads``.
        query_start: first row of the first query head.
        key_start: first row of the first key head.
    """

    query: str | Sequence[str]
    key: str | Sequence[str]
    heads: int
    key_heads: int | None = None
    head_dim: int | None = None
    query_start: int = 0
    key_start: int = 0


class QKClip:
    """Scale down the heads whose largest logit was above ``threshold``; give it to ``Muon(qk_clip=...)``.

    In every forward call :meth:`record` with each layer's attention logits. After the update of ``Muon.step``, a head
    ``h`` with largest logit ``S_h > threshold`` since the last step, over all ranks, is scaled so that its logits are
    those times ``threshold / S_h``: key and query rows by the square root of it each. Key heads that serve several
    query heads are scaled for the largest, and each of their query heads by what is left to do for it.

    With it ``Muon.step`` issues one small all-reduce for each dimension of the mesh of owned or sharded parameters, or
    one over the default process group if all parameters are plain (a replicated model): one float32 a head and a layer,
    and one that tells all ranks if a rank cannot step. Logits that are NaN or +inf on any rank end the step on all.

    Args:
        layers: a :class:`QKLayer` for each layer, by a name of your choice.
        threshold: largest logit to allow.

    Source: Kimi Team, "Kimi K2", arXiv:2507.20534, section 2.1 (MuonClip).
    """

    def __init__(self, layers: Mapping[str, QKLayer], threshold: float = 100.0) -> None:
        if not threshold > 0:
            raise ValueError(f"QKClip: threshold must be positive, got {threshold!r}")
        if not layers:
            raise ValueError("QKClip: there are no layers; leave it out, or name the attention layers to watch")
        for name, layer in layers.items():
            key_heads = layer.heads if layer.key_heads is None else layer.key_heads
            if layer.heads < 1 or key_heads < 1 or layer.heads % key_heads:
                raise ValueError(f"QKClip: layer {name!r} has {layer.heads} heads for {layer.key_heads} key heads")
        self.layers = dict(layers)
        self.threshold = threshold
        self._largest: dict[str, Tensor] = {}
        self._rows: dict[str, list[tuple[str, str, int, int]]] = {}  # parameter -> (layer, role, start, head_dim)

    @torch.no_grad()
    def record(self, layer: str, logits: Tensor) -> None:
        """Note logits of one forward: ``[batch, heads, queries, keys]``, or each head's largest ``[heads]``. Local.

        Raises:
            ValueError: an unknown layer, or another number of heads.
        """
        if layer not in self.layers:
            raise ValueError(f"QKClip has no layer {layer!r}: it has {', '.join(map(repr, self.layers))}")
        heads = self.layers[layer].heads
        shape = tuple(logits.shape)
        if len(shape) not in (1, 4) or shape[-3 if len(shape) == 4 else 0] != heads:
            raise ValueError(
                f"QKClip: the logits of layer {layer!r} have shape {shape}, not [batch, {heads}, queries, keys] or "
                f"[{heads}]"
            )
        largest = (logits if logits.ndim == 1 else logits.amax((0, 2, 3))).detach().float()
        former = self._largest.get(layer)
        self._largest[layer] = largest if former is None else torch.maximum(former, largest)

    def bind(self, params: Mapping[str, Tensor]) -> None:
        """Find the layers' rows in the parameters of an optimizer, by name. Local; called by ``Muon``.

        Raises:
            ValueError: a name that is not there, a parameter with too few rows, or heads that do not fit its rows.
        """
        rows: dict[str, list[tuple[str, str, int, int]]] = {}
        for name, layer in self.layers.items():
            queries, keys = _names(layer.query), _names(layer.key)
            missing = [fqn for fqn in (*queries, *keys) if fqn not in params]
            if missing:
                raise ValueError(
                    f"QKClip: layer {name!r} names {missing}, which the optimizer does not have under that name; give "
                    "it the model or (name, parameter) pairs"
                )
            head_dim = _head_dim(name, layer, queries[0], params[queries[0]].shape[0])
            for role, fqns, start, heads in (
                ("query", queries, layer.query_start, layer.heads),
                ("key", keys, layer.key_start, layer.key_heads or layer.heads),
            ):
                for fqn in fqns:
                    if start < 0 or start + heads * head_dim > params[fqn].shape[0]:
                        raise ValueError(
                            f"QKClip: layer {name!r}: {heads} {role} heads of {head_dim} rows from row {start} on do "
                            f"not fit {fqn!r} of shape {tuple(params[fqn].shape)}"
                        )
                    rows.setdefault(fqn, []).append((name, role, start, head_dim))
        self._rows = rows

    def take_factors(self, params: Mapping[str, Tensor], problem: str | None = None) -> dict[tuple[str, str], Tensor]:
        """The factor of every head, by layer and "query" or "key"; forgets what was recorded. Collective.

        Every rank must call it, whether it has recorded or not, and whether it can step or has a ``problem``.

        Raises:
            RuntimeError: on all ranks, if one has a problem (what was recorded is kept), or if one has recorded a logit
                that is NaN or +inf (what was recorded is forgotten, so that a loop may pass over the step).
        """
        first = params[next(iter(self._rows))]
        parts, flags = [], []
        for name, layer in self.layers.items():
            nothing = torch.full((layer.heads,), -torch.inf, device=first.device)
            most = self._largest.get(name, nothing).to(first.device)
            unfit = most.isnan() | (most == torch.inf)
            # Flags of their own, because what a maximum over NaN is depends on the backend.
            parts.append(torch.where(unfit, -torch.inf, most))
            flags.append(unfit.any().float())
        # The last one is no layer: it brings word of a problem without a collective of its own.
        flags.append(torch.full((), 0.0 if problem is None else 1.0, device=first.device))
        largest = torch.cat([*parts, torch.stack(flags)])
        for group in _groups(params.values()):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        *unfit_layers, elsewhere = largest[-len(flags) :].tolist()
        if problem is not None or elsewhere:
            raise RuntimeError(
                problem or "Muon: another rank cannot take this step, see its error. No parameter was updated"
            )
        self._largest = {}
        unfit_names = [name for name, flag in zip(self.layers, unfit_layers, strict=True) if flag]
        if unfit_names:
            raise RuntimeError(
                f"QKClip: the attention logits of layer {', '.join(map(repr, unfit_names))} were inf or NaN on some "
                "rank, and no factor mends that: lower the learning rate or the threshold, or compute and record the "
                "logits in a wider dtype. No parameter was updated"
            )
        factors: dict[tuple[str, str], Tensor] = {}
        counts = [layer.heads for layer in self.layers.values()]
        for (name, layer), most in zip(self.layers.items(), largest[: -len(flags)].split(counts), strict=True):
            factor = torch.where(most > self.threshold, self.threshold / most, 1.0)
            factor = factor.clamp(min=torch.finfo(factor.dtype).tiny)  # it is divided by below
            key = factor.view(layer.key_heads or layer.heads, -1).amin(1).sqrt()
            factors[name, "key"] = key
            factors[name, "query"] = factor / key.repeat_interleave(layer.heads // len(key))
        return factors

    def apply(self, name: str, p: Tensor, factors: Mapping[tuple[str, str], Tensor]) -> None:
        """Scale the rows of parameter ``name`` where it is stepped; in place, local."""
        for layer, role, start, head_dim in self._rows.get(name, []):
            if not is_stepped_here(p):
                continue
            factor = factors[layer, role].repeat_interleave(head_dim)
            offset = _first_row(p)
            weight = local(p)
            low, high = max(start, offset), min(start + len(factor), offset + weight.shape[0])
            if low < high:
                part = factor[low - start : high - start].to(weight.dtype)
                weight[low - offset : high - offset] *= part.view(-1, *(1,) * (weight.ndim - 1))


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _head_dim(name: str, layer: QKLayer, fqn: str, rows: int) -> int:
    if layer.head_dim is not None and layer.head_dim < 1:
        raise ValueError(f"QKClip: layer {name!r}: head_dim must be positive, got {layer.head_dim}")
    if layer.head_dim is None and rows % layer.heads:
        raise ValueError(
            f"QKClip: layer {name!r}: the {rows} rows of {fqn!r} cannot be divided into {layer.heads} heads; give "
            "head_dim"
        )
    return layer.head_dim or rows // layer.heads


def _groups(params: Iterable[Tensor]) -> list[dist.ProcessGroup | None]:
    """The groups to reduce over, one after the other, so that it is over all ranks that train these parameters.

    None is the default group, over which plain parameters are replicated. The same on every rank.
    """
    meshes = [(isinstance(p, OwnedTensor), p.device_mesh) for p in params if isinstance(p, DTensor)]
    if meshes:
        # Owned parameters have the whole mesh; of meshes of sharded ones the largest is.
        _, mesh = max(meshes, key=lambda entry: (entry[0], entry[1].size()))
        return [mesh.get_group(dim) for dim in range(mesh.ndim)]
    return [None] if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else []


def _first_row(p: Tensor) -> int:
    if isinstance(p, OwnedTensor) or not isinstance(p, DTensor):
        return 0
    return compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)[1][0]
