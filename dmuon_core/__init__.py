"""dmuon_core: matrix optimizers for FSDP2 by dedicated ownership. Depends on torch alone."""

from dmuon_core.fsdp2 import install_patches

install_patches()

from dmuon_core.api import dedicate_params, no_sync, register_forward_method, reset  # noqa: E402
from dmuon_core.boundary import default_boundaries  # noqa: E402
from dmuon_core.describe import describe  # noqa: E402
from dmuon_core.grad_clip import clip_grad_norm_  # noqa: E402
from dmuon_core.invariants import check_invariants  # noqa: E402
from dmuon_core.optim import Muon, NewtonSchulzFlops, OwnedOptimizer, QKClip, QKLayer  # noqa: E402
from dmuon_core.owned_tensor import OwnedTensor  # noqa: E402
from dmuon_core.registry import get_dedicated  # noqa: E402
from dmuon_core.runtime import DedicatedModel  # noqa: E402

__all__ = [
    "DedicatedModel",
    "Muon",
    "NewtonSchulzFlops",
    "OwnedOptimizer",
    "OwnedTensor",
    "QKClip",
    "QKLayer",
    "check_invariants",
    "clip_grad_norm_",
    "dedicate_params",
    "default_boundaries",
    "describe",
    "get_dedicated",
    "no_sync",
    "register_forward_method",
    "reset",
]
