"""dmuon_lightning: dmuon_core for Lightning. Thin: translates, holds no algorithm."""

from dmuon_core import Muon
from dmuon_lightning.strategy import DMuonStrategy

__all__ = ["DMuonStrategy", "Muon"]
