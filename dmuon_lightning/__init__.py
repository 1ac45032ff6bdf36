"""dmuon_lightning: dmuon_core for Lightning. Thin: translates, holds no algorithm.

Importing it makes the strategies known by name: ``Trainer(strategy="dmuon")``, or ``"dmuon_z2"``.
"""

from dmuon_lightning.averaging import DMuonWeightAveraging
from dmuon_lightning.fabric import DMuonFabricStrategy
from dmuon_lightning.muon import Muon
from dmuon_lightning.precision import grad_norm
from dmuon_lightning.strategy import DMuonStrategy

__all__ = ["DMuonFabricStrategy", "DMuonStrategy", "DMuonWeightAveraging", "Muon", "grad_norm"]
