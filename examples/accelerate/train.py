"""A training script of Accelerate with owned matrices.

    accelerate launch --config_file examples/accelerate/dmuon.yaml examples/accelerate/train.py
    python examples/accelerate/train.py                       # one process, on any machine: the same numbers

A small residual network learns to imitate a fixed random network. `--save FOLDER` writes the whole state in the middle,
`--load FOLDER` goes on from there, with any number of launched processes (`--num_processes 1` included; without the
launcher the format is another); `--report FILE` writes the losses.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dmuon_lightning.accelerate import DMuonPlugin, Muon

INPUTS, WIDTH, OUTPUTS, ROWS, BATCH = 16, 64, 8, 2560, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def data() -> TensorDataset:
    x = torch.randn(ROWS, INPUTS)
    teacher = nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh(), nn.Linear(32, OUTPUTS))
    with torch.no_grad():
        return TensorDataset(x, teacher(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--ns-dtype", default="bfloat16", help="of Newton-Schulz; float32 to compare runs digit by digit"
    )
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()

    # The plugin takes what is not said here from the config file and from DMUON_* variables.
    accelerator = Accelerator(
        fsdp_plugin=DMuonPlugin(),
        gradient_accumulation_steps=2,
        step_scheduler_with_optimizer=False,
        dataloader_config=DataLoaderConfiguration(split_batches=True),  # BATCH rows for all processes together
    )
    set_seed(0)
    loader = DataLoader(data(), batch_size=BATCH)
    model = Net()
    optimizer = Muon(model, lr=0.02, adamw_lr=0.01, ns_dtype=getattr(torch, args.ns_dtype))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if args.load:
        accelerator.load_state(args.load)

    losses = []
    first = scheduler.scheduler.last_epoch
    batches = list(loader)
    for step in range(first, args.steps):
        total = torch.zeros((), device=accelerator.device)
        for micro in range(2):
            x, target = batches[(2 * step + micro) % len(batches)]
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x), target)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)  # over owned and sharded gradients
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / 2
        scheduler.step()
        losses.append(accelerator.reduce(total, "mean").item())
        if step % 10 == 0 or step == args.steps - 1:
            accelerator.print(f"step {step:3d}  loss {losses[-1]:.4f}")
        if args.save and step == args.steps // 2 - 1:
            accelerator.save_state(args.save)

    if args.save:
        accelerator.save_model(model, args.save / "model")
    if args.report and accelerator.is_main_process:
        args.report.write_text(json.dumps(losses))
    accelerator.end_training()


if __name__ == "__main__":
    main()
