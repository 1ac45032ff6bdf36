"""OwnedTensor: what a dedicated parameter is at rest.

A DTensor subclass with the true global shape whose data lives whole on its owner and has 0 rows everywhere else.
Because it *is* a DTensor, ``named_parameters()``, ``state_dict()``, gradient clipping, optimizers, deepcopy and
``torch.distributed.checkpoint`` treat it as the sharded parameter that it is. What may be computed on it is decided in
``owned_ops.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_leaves

Owner = tuple[int | None, ...]
"""Mesh coordinates of the data, one per mesh dimension; ``None`` means: every rank along that dimension has a copy."""


@dataclass
class Delivery:
    """How the replicas of a weight get its home's data; one object for the weight and all aliases of it.

    Attributes:
        arrival: waits for data on its way to this rank and puts it in place; None if there is none.
        due: whether replicas may differ from the home until it sends its data.
    """

    arrival: Callable[[], None] | None = None
    due: bool = True


class OwnedTensor(DTensor):
    """A tensor of global shape ``[m, ...]`` whose data is whole on its owner and has 0 rows on all other ranks.

    The nominal placement is ``Shard(0)`` along each mesh dimension that has an owner coordinate and ``Replicate()``
    along the others. Create one with :meth:`wrap` or :func:`own_like`, never by the constructor.
    """

    _owner: Owner
    _home: tuple[int, ...]
    _fqn: str
    _delivery: Delivery | None

    @staticmethod
    def wrap(
        local: torch.Tensor,
        shape: torch.Size,
        mesh: DeviceMesh,
        owner: Owner,
        fqn: str = "",
        home: tuple[int, ...] | None = None,
    ) -> OwnedTensor:
        """Make an OwnedTensor of global ``shape`` from this rank's ``local`` data (no copy). Local, no collective.

        Args:
            local: the whole tensor on a rank that :func:`holds` the data, ``[0, *shape[1:]]`` elsewhere.
            shape: global shape.
            mesh: the device mesh that ``owner`` gives coordinates on.
            owner: mesh coordinates of the data.
            fqn: parameter name for error messages.
            home: coordinates of the one rank that steps the parameter; by default the first one of ``owner``.

        Raises:
            ValueError: if ``local`` does not have the shape that this rank must hold.
        """
        expected = shape if holds(mesh, owner) else torch.Size((0, *shape[1:]))
        if local.shape != expected:
            raise ValueError(
                f"owned tensor '{fqn}' of shape {tuple(shape)}: this rank must pass a local tensor of shape "
                f"{tuple(expected)}, got {tuple(local.shape)}"
            )
        meta = TensorMeta(shape, _contiguous_stride(shape), local.dtype)
        placements: tuple[Placement, ...] = tuple(Replicate() if c is None else Shard(0) for c in owner)
        tensor = OwnedTensor(local, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)
        tensor._owner = owner
        tensor._home = tuple(0 if c is None else c for c in owner) if home is None else home
        tensor._fqn = fqn
        tensor._delivery = None
        return tensor

    @property
    def owner(self) -> Owner:
        """Mesh coordinates of the data; ``None`` where every rank of a mesh dimension has a copy."""
        return self._owner

    @property
    def fqn(self) -> str:
        """Name of the parameter that this tensor belongs to, for messages; may be empty."""
        return self._fqn

    @property
    def is_owner(self) -> bool:
        """Whether this rank holds the data."""
        return holds(self._spec.mesh, self._owner)

    @property
    def home(self) -> tuple[int, ...]:
        """Mesh coordinates of the one rank that steps the parameter, among those that hold the data."""
        return self._home

    @property
    def is_home(self) -> bool:
        """Whether this rank steps the parameter."""
        return holds(self._spec.mesh, self._home)

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """As of any tensor; of a parameter refused, because its gradient is put there by reduction, not by autograd.

        Raises:
            RuntimeError: on a parameter.
        """
        if isinstance(self, nn.Parameter):
            raise RuntimeError(
                f"'{self._fqn}' is owned: a hook of register_hook would not run on its reduced gradient, use "
                "register_post_accumulate_grad_hook"
            )
        return super().register_hook(hook)

    def lives_with(self, other: OwnedTensor) -> bool:
        """Whether both have their data, and their home, on the same ranks of one mesh."""
        mine, theirs = ((t._owner, t._home, t._spec.mesh) for t in (self, other))
        return mine == theirs

    def like(self, local: torch.Tensor) -> OwnedTensor:
        """An OwnedTensor of this one's shape and owner over other local data of any dtype. Local."""
        return OwnedTensor.wrap(local, self.shape, self._spec.mesh, self._owner, self._fqn, self._home)

    def at_home(self, local: torch.Tensor) -> OwnedTensor:
        """An OwnedTensor like this one whose data only its home has, as gradients and optimizer state. Local."""
        return OwnedTensor.wrap(local, self.shape, self._spec.mesh, self._home, self._fqn)

    def zeros_at_home(self) -> OwnedTensor:
        """Zeros of this tensor's shape and dtype whose data only its home has. Local."""
        local = self._local_tensor
        return self.at_home(torch.zeros_like(local) if self.is_home else local.new_empty((0, *self.shape[1:])))

    @property
    def delivery(self) -> Delivery | None:
        """How replicas get the home's data; None for what is not a weight, such as gradients and optimizer state."""
        found = getattr(self, "_delivery", None)
        if found is None and isinstance(self, nn.Parameter):
            found = self._delivery = Delivery()
        return found

    def alias(self, local: torch.Tensor) -> OwnedTensor:
        """An OwnedTensor of this one over ``local``, which shares its storage. Local."""
        tensor = self.like(local)
        tensor._delivery = self.delivery
        return tensor

    def arrive(self) -> None:
        """Let data that is on its way arrive. Local: waits for what its sender has started."""
        delivery = getattr(self, "_delivery", None)
        if delivery is not None and delivery.arrival is not None:
            arrival, delivery.arrival = delivery.arrival, None
            arrival()

    def leave_to_home(self) -> None:
        """Note an in-place operation that only the home can do. Local; every rank runs the same operations.

        Replicas of a weight then follow later. Anything else, such as an optimizer's moments that were made like the
        weight, belongs to the home alone from now on.
        """
        if self.delivery is not None:
            self.delivery.due = True
            return
        mine = self.at_home(self._local_tensor if self.is_home else self._local_tensor.new_empty((0, *self.shape[1:])))
        self._local_tensor, self._spec, self._owner = mine._local_tensor, mine._spec, mine._owner

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.arrive()
        return super().__reduce_ex__(protocol)

    def to_local(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """This rank's part: the whole tensor where the data is, 0 rows elsewhere. Local."""
        self.arrive()
        return super().to_local(*args, **kwargs)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor on every rank, as a new plain tensor. Collective: one broadcast per owned mesh dimension.

        Differentiable, as DTensor's: the gradient of the result, which every rank computes for itself, is taken as it
        is by the home.
        """
        self.arrive()
        if torch.is_grad_enabled() and self.requires_grad:
            return _FullTensor.apply(self)
        return self._gather()

    def _gather(self) -> torch.Tensor:
        local = self._local_tensor.detach()
        full = local.contiguous().clone() if self.is_owner else local.new_empty(self.shape)
        mesh = self._spec.mesh
        # Innermost dimension first: afterwards the owner's row is complete and can serve the outer dimension.
        for dim in reversed(range(mesh.ndim)):
            source = self._owner[dim]
            if source is not None and mesh.size(dim) > 1:
                dist.broadcast(full, group=mesh.get_group(dim), group_src=source)
        return full

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **kwargs: Any
    ) -> DTensor:
        """This tensor as a regular DTensor with ``placements`` on its own mesh. Collective."""
        mesh = self._spec.mesh
        replicated = DTensor.from_local(self.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return replicated.redistribute(device_mesh or mesh, placements, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"OwnedTensor('{self._fqn}', shape={tuple(self.shape)}, dtype={self.dtype}, owner={self._owner}, "
            f"local={tuple(self._local_tensor.shape)})"
        )

    # torch.distributed.checkpoint: the owner writes and reads one chunk that is the whole tensor.

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        if not self._writes_checkpoint():
            return []
        origin = torch.Size([0] * self.dim())
        return [
            WriteItem(
                index=MetadataIndex(fqn, origin),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=origin, sizes=self.shape),
                    properties=TensorProperties.create_from_tensor(self._local_tensor),
                    size=self.shape,
                ),
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if not self.is_owner:
            return []
        return [ChunkStorageMetadata(offsets=torch.Size([0] * self.dim()), sizes=self.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        self.arrive()
        return self._local_tensor

    def _writes_checkpoint(self) -> bool:
        return self.is_home

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        from dmuon_core.owned_ops import dispatch  # at call time: the rules need this class

        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, OwnedTensor):
                tensor.arrive()
        return dispatch(func, args, kwargs or {})


class _FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owned: OwnedTensor) -> torch.Tensor:
        ctx.owned = owned.detach()
        return owned._gather()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> OwnedTensor:
        owned: OwnedTensor = ctx.owned
        grad = grad.to(owned.dtype)
        return owned.at_home(grad.contiguous() if owned.is_home else grad.new_empty((0, *owned.shape[1:])))


def holds(mesh: DeviceMesh, owner: Owner) -> bool:
    """Whether this rank is at the ``owner`` coordinates of ``mesh`` and so holds the data. Local."""
    return all(c is None or mesh.get_local_rank(dim) == c for dim, c in enumerate(owner))


def empty_like_non_owner(shape: torch.Size, *, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """The local part of a rank that is not the owner: 0 rows. Local."""
    return torch.empty((0, *shape[1:]), dtype=dtype, device=device)


def own_like(value: torch.Tensor, like: OwnedTensor) -> OwnedTensor:
    """``value`` as an OwnedTensor of the owner of ``like``, in the dtype of ``value``.

    Pass ``parameter.zeros_at_home()`` to place optimizer state.

    Args:
        value: the full tensor on every rank (or at least on the owner), or any DTensor of the same global shape.
        like: gives shape, mesh and owner.

    Collective if ``value`` is a DTensor that is not yet owned by that owner, local otherwise.

    Raises:
        ValueError: if the shapes differ.
    """
    if value.shape != like.shape:
        raise ValueError(
            f"'{like.fqn}' has shape {tuple(like.shape)}, the value to own has {tuple(value.shape)}: "
            "it belongs to another model"
        )
    if isinstance(value, OwnedTensor) and value.lives_with(like):
        return value
    full = value.full_tensor() if isinstance(value, DTensor) else value
    device = full.device if like.is_meta else like.device  # a model on meta takes over what is loaded into it
    if like.is_owner:
        # Always a copy: the source may be a view into a checkpoint file or be kept by the caller.
        return like.like(full.detach().to(device, copy=True).contiguous())
    return like.like(empty_like_non_owner(like.shape, dtype=full.dtype, device=device))


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
