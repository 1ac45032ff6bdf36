"""dmuon_lightning: dmuon_core for Lightning and for Accelerate. Thin: translates, holds no algorithm.

Importing it makes the strategies known by name where Lightning is installed: ``Trainer(strategy="dmuon")``, or
``"dmuon_z2"``. What is for Accelerate is in :mod:`dmuon_lightning.accelerate`, which does not need Lightning.
"""

from importlib.util import find_spec

if find_spec("lightning") or find_spec("pytorch_lightning"):
    from dmuon_lightning.averaging import DMuonWeightAveraging
    from dmuon_lightning.fabric import DMuonFabricStrategy
    from dmuon_lightning.muon import Muon
    from dmuon_lightning.precision import grad_norm
    from dmuon_lightning.strategy import DMuonStrategy

__all__ = ["DMuonFabricStrategy", "DMuonStrategy", "DMuonWeightAveraging", "Muon", "grad_norm"]
