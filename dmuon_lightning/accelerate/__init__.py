"""DMuon for Hugging Face Accelerate, and with it for the Trainer of transformers and those of TRL.

Three ways in: ``Accelerator(fsdp_plugin=DMuonPlugin(...))``; :func:`enable`, one line for scripts that do not build the
Accelerator themselves; and no line, ``accelerate launch ... -m dmuon_lightning.accelerate.run train.py``. Needs
Accelerate, not Lightning.
"""

from dmuon_lightning.accelerate.enable import enable
from dmuon_lightning.accelerate.optimizer import Muon
from dmuon_lightning.accelerate.plugin import DMuonPlugin
from dmuon_lightning.accelerate.trainer import DMuonTrainerOptimizer, prepare_trainer

__all__ = ["DMuonPlugin", "DMuonTrainerOptimizer", "Muon", "enable", "prepare_trainer"]
