"""A script of a user of ``pytorch_lightning``: `python other_trainer.py RESULT DEVICES [alone]`. Not a test by itself.

With ``alone``, as if ``lightning`` was not installed.
"""

from __future__ import annotations

import json
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


class _Hidden(PathFinder):
    """Finds no ``lightning``."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] == "lightning" else super().find_spec(name, path, target)


if "alone" in sys.argv:
    sys.meta_path = [_Hidden if finder is PathFinder else finder for finder in sys.meta_path]

import pytorch_lightning as pl  # noqa: E402
import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
from pytorch_lightning.callbacks import ModelCheckpoint  # noqa: E402

if "alone" in sys.argv:
    from dmuon_lightning import DMuonStrategy, DMuonWeightAveraging, Muon
else:
    from dmuon_lightning import Muon
    from dmuon_lightning.pytorch_lightning import DMuonStrategy, DMuonWeightAveraging


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return Muon(self.parameters(), lr=0.02, adamw_lr=0.01, ns_dtype=torch.float32)


def data() -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 6, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.argmax(1) % 4), batch_size=32)


def main(folder: Path, devices: int) -> dict[str, Any]:
    """Every rank sees all rows, so the numbers do not depend on how many there are."""
    options: dict[str, Any] = {"accelerator": "cpu", "devices": devices, "use_distributed_sampler": False}
    options |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}

    def strategy() -> Any:
        return DMuonStrategy(reshard_after_forward=False) if devices == 1 else "dmuon_z2"

    callbacks: list[pl.Callback] = [DMuonWeightAveraging(decay=0.5), ModelCheckpoint(folder, "{epoch}")]
    module = Net()
    trainer = pl.Trainer(strategy=strategy(), max_epochs=3, gradient_clip_val=0.5, callbacks=callbacks, **options)
    trainer.fit(module, data(), data())
    again = Net()
    callbacks = [DMuonWeightAveraging(decay=0.5)]
    trainer = pl.Trainer(strategy=strategy(), max_epochs=5, callbacks=callbacks, enable_checkpointing=False, **options)
    trainer.fit(again, data(), data(), ckpt_path=str(folder / "epoch=2.ckpt"), weights_only=False)
    return {
        "rank": trainer.global_rank,
        "trees": sorted({name.partition(".")[0] for name in sys.modules} & {"lightning", "pytorch_lightning"}),
        "losses": module.losses + again.losses,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = Path(sys.argv[1])
    report = main(result.parent, int(sys.argv[2]))
    result.with_suffix(f".{report['rank']}").write_text(json.dumps(report))
