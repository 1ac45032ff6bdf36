"""Optimizers over owned, sharded and plain parameters."""

from dmuon_core.optim.cost import NewtonSchulzFlops
from dmuon_core.optim.muon import Muon
from dmuon_core.optim.newton_schulz import orthogonalize
from dmuon_core.optim.owned import OwnedOptimizer
from dmuon_core.optim.qk_clip import QKClip, QKLayer

__all__ = ["Muon", "NewtonSchulzFlops", "OwnedOptimizer", "QKClip", "QKLayer", "orthogonalize"]
