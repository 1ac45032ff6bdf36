"""Optimizers over owned, sharded and plain parameters."""

from dmuon_core.optim.muon import Muon
from dmuon_core.optim.newton_schulz import orthogonalize

__all__ = ["Muon", "orthogonalize"]
