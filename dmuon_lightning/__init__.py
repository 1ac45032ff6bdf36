"""dmuon_lightning: dmuon_core for Lightning. Thin: translates, holds no algorithm."""

from dmuon_lightning.muon import Muon
from dmuon_lightning.strategy import DMuonStrategy

__all__ = ["DMuonStrategy", "Muon"]
