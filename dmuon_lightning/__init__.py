"""dmuon_lightning: dmuon_core for Lightning and for Accelerate. Thin: translates, holds no algorithm.

Importing it makes the strategies known by name where Lightning is installed: ``Trainer(strategy="dmuon")``, or
``"dmuon_z2"``. What is for Accelerate is in :mod:`dmuon_lightning.accelerate`, which does not need Lightning.
"""

from importlib.util import find_spec
from typing import NoReturn

if find_spec("lightning") or find_spec("pytorch_lightning"):
    from dmuon_lightning.averaging import DMuonWeightAveraging
    from dmuon_lightning.fabric import DMuonFabricStrategy
    from dmuon_lightning.muon import Muon
    from dmuon_lightning.precision import grad_norm
    from dmuon_lightning.strategy import DMuonStrategy
else:

    def __getattr__(name: str) -> NoReturn:
        if name in __all__:
            raise ImportError(f"dmuon_lightning.{name} needs Lightning: pip install 'dmuon-lightning[lightning]'")
        raise AttributeError(f"module 'dmuon_lightning' has no attribute {name!r}")


__all__ = ["DMuonFabricStrategy", "DMuonStrategy", "DMuonWeightAveraging", "Muon", "grad_norm"]
