"""A training script as users have it: `python launched.py RESULT DEVICES`, or under torchrun. Not a test by itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch

from dmuon_lightning import DMuonStrategy
from tests.lightning import modules
from tests.lightning.runs import full_weights, muon

if __name__ == "__main__":
    torch.set_num_threads(1)
    result, devices = Path(sys.argv[1]), int(sys.argv[2])
    trainer = pl.Trainer(
        strategy=DMuonStrategy(),
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        use_distributed_sampler=False,
        default_root_dir=result.parent,
    )
    module = modules.Net(muon)
    trainer.fit(module, datamodule=modules.FixedOrder())
    weights = full_weights(module)
    norm = torch.stack([weight.norm() for weight in weights.values()]).norm().item()
    report = {
        "rank": trainer.global_rank,
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "losses": module.losses,
        "weights": norm,
        "checkpoint": trainer.checkpoint_callback.best_model_path,  # type: ignore[union-attr]
    }
    result.with_suffix(f".{trainer.global_rank}").write_text(json.dumps(report))
