"""Trains a small byte-level GPT on real text with owned matrices, under Lightning's Trainer.

    python examples/train_gpt.py                      # Muon, 2 CPU processes, or all GPUs if there are any
    python examples/train_gpt.py --optimizer adamw    # the same model with FSDP2 and AdamW, to compare

The text is the source of the Python standard library, or `--text FILE`. Ends with the validation loss, a
sample of generated text, a picture of the loss curve and a checkpoint in one file.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from curves import LossHistory, SpeedBar, draw
from gpt import GPT, GPTConfig, Windows, load_text, next_byte_loss
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from dmuon_core import Muon
from dmuon_lightning import DMuonStrategy

# The best of four settings each, tried in one process over 400 steps; half and twice Muon's rate did worse, as
# did AdamW's at 2e-3 and 4e-3.
LEARNING_RATES = {"muon": 0.04, "adamw": 3e-3}
BETAS = (0.9, 0.95)
VALIDATION_WINDOWS = 512


class GPTModule(L.LightningModule):
    """A stock LightningModule: it says nothing of sharding or ownership, the strategy does that."""

    def __init__(self, *, dim: int, layers: int, heads: int, context: int, steps: int, lr: float, adamw_lr: float):
        super().__init__()
        self.save_hyperparameters()
        self.steps, self.lr, self.adamw_lr = steps, lr, adamw_lr
        self.model = GPT(GPTConfig(dim=dim, layers=layers, heads=heads, context=context))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        loss = next_byte_loss(self.model(tokens), targets)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        tokens, targets = batch
        loss = next_byte_loss(self.model(tokens), targets)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(tokens))

    def make_optimizer(self) -> Optimizer:
        return Muon(self, lr=self.lr, adamw_lr=self.adamw_lr, adamw_betas=BETAS)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.make_optimizer()
        schedule = LambdaLR(optimizer, lambda step: warmup_then_linear(step, self.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class FSDP2AdamWModule(GPTModule):
    """The same model without this library: sharded by hand, and AdamW for all of it."""

    def configure_model(self) -> None:
        if isinstance(self.model, FSDPModule):  # called again by each of fit and validate
            return
        assert self.device_mesh is not None  # set by ModelParallelStrategy
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def make_optimizer(self) -> Optimizer:
        return AdamW(self.parameters(), lr=self.lr, betas=BETAS, weight_decay=0.1)


def warmup_then_linear(step: int, steps: int) -> float:
    """Factor of the learning rate: up over the first twentieth of the run, then down to zero at its end."""
    warmup = max(1, steps // 20)
    return min((step + 1) / warmup, max(0.0, (steps - step) / (steps - warmup + 1)))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small byte-level GPT with owned matrices.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    gpus = torch.cuda.device_count()
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon", help="adamw: with plain FSDP2")
    parser.add_argument("--text", type=Path, help="a file to learn instead of the Python standard library")
    parser.add_argument("--out", type=Path, help="folder of the results; default: runs/gpt-OPTIMIZER")
    parser.add_argument("--devices", type=int, default=gpus or 2, help="GPUs if there are any, else CPU processes")
    parser.add_argument("--precision", default="32-true", help="as Trainer(precision=...)")
    parser.add_argument("--steps", type=int, default=320, help="optimizer steps")
    parser.add_argument("--eval-every", type=int, default=80, help="steps between validations")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences in a step, over all processes")
    parser.add_argument("--lr", type=float, help=f"peak learning rate; default: {LEARNING_RATES}")
    parser.add_argument("--adamw-lr", type=float, default=4e-3, help="Muon only: for all that is not a hidden matrix")
    parser.add_argument("--dim", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="number of blocks")
    parser.add_argument("--heads", type=int, default=4, help="attention heads in a block")
    parser.add_argument("--context", type=int, default=128, help="length of a sequence, in bytes")
    parser.add_argument("--sample", type=int, default=400, help="bytes of text to generate at the end")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.batch_size % args.devices:
        parser.error(f"--batch-size {args.batch_size} is not a multiple of --devices {args.devices}")
    if args.lr is None:
        args.lr = LEARNING_RATES[args.optimizer]
    if args.out is None:
        args.out = Path("runs", f"gpt-{args.optimizer}")
    return args


def make_loaders(args: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    """Training windows, and a fixed set of windows from the last fiftieth of the text, never trained on."""
    text = load_text(args.text)
    cut = len(text) - len(text) // 50
    train, val = Windows(text[:cut], args.context), Windows(text[cut:], args.context)
    # As many windows on every process: the sampler has none to repeat, and the loss is that of one process.
    count = min(VALIDATION_WINDOWS, len(val)) // args.devices * args.devices
    spread = torch.linspace(0, len(val) - 1, count).long().tolist()
    size = args.batch_size // args.devices
    return (
        DataLoader(train, batch_size=size, shuffle=True, drop_last=True),
        DataLoader(torch.utils.data.Subset(val, spread), batch_size=size),
    )


def make_trainer(args: argparse.Namespace, callbacks: list[L.Callback]) -> L.Trainer:
    strategy: ModelParallelStrategy
    if args.optimizer == "muon":
        strategy = DMuonStrategy()
    else:
        strategy = ModelParallelStrategy(args.devices, 1, save_distributed_checkpoint=False)
    return L.Trainer(
        strategy=strategy,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        precision=args.precision,
        max_steps=args.steps,
        limit_train_batches=args.steps,  # one pass of the progress bar is the whole run
        val_check_interval=args.eval_every,
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,  # one checkpoint, at the end, by hand
        enable_model_summary=False,
        callbacks=callbacks,
    )


def report(args: argparse.Namespace, loss: float, history: LossHistory, bar: SpeedBar, checkpoint: Path) -> None:
    """Rank 0 only: says what was learnt and where it lies. A plain model, loaded here, writes the sample."""
    history.save(args.out / "loss.csv")
    runs = {args.optimizer: history}
    for other in sorted({"muon", "adamw"} - {args.optimizer}):
        earlier = Path("runs", f"gpt-{other}", "loss.csv")
        if args.out == Path("runs", f"gpt-{args.optimizer}") and earlier.exists():
            runs[other] = LossHistory.load(earlier)
    draw(runs, args.out / "loss.png")

    plain = GPTModule.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True).model.eval()
    sample = plain.generate(b"def ", args.sample, seed=args.seed).decode(errors="replace")
    (args.out / "sample.txt").write_text(sample, encoding="utf-8")
    print(f"\n--- a sample, generated from the checkpoint ---\n{sample}\n---")
    print(f"validation loss  {loss:.4f} nats per byte after {args.steps} steps of {args.optimizer}")
    print(f"speed            {bar.tokens_per_second:,.0f} tokens/s on {args.devices} processes")
    for what, name in (("loss curve", "loss.png"), ("losses", "loss.csv"), ("sample", "sample.txt")):
        print(f"{what:<16} {args.out / name}")
    print(f"{'checkpoint':<16} {checkpoint}")


def main() -> None:
    args = parse_args()
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        # One thread a process, also in the processes that the Trainer starts: they share the cores already.
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    # The text is in memory: loading needs no workers. Validation windows divide evenly: none is repeated.
    for known in (
        ".*does not have many workers.*",
        ".*Using `DistributedSampler`.*",
        ".*isinstance.treespec.*",
    ):
        warnings.filterwarnings("ignore", known)
    L.seed_everything(args.seed, verbose=False)

    sizes = {name: getattr(args, name) for name in ("dim", "layers", "heads", "context", "steps", "lr", "adamw_lr")}
    module = (GPTModule if args.optimizer == "muon" else FSDP2AdamWModule)(**sizes)
    parameters = sum(p.numel() for p in module.parameters())
    train, val = make_loaders(args)
    history, bar = LossHistory(), SpeedBar(args.batch_size * args.context)
    trainer = make_trainer(args, [history, bar])
    if trainer.is_global_zero:
        text = args.text or "the Python standard library"
        print(f"{parameters:,} parameters learn {text} with {args.optimizer} on {args.devices} processes")
        args.out.mkdir(parents=True, exist_ok=True)

    trainer.fit(module, train, val)
    checkpoint = args.out / "model.ckpt"
    trainer.save_checkpoint(checkpoint)
    [final] = trainer.validate(module, val, verbose=False)
    if trainer.is_global_zero:
        report(args, final["val_loss"], history, bar, checkpoint)
    if args.optimizer == "adamw":
        # Threads of gloo that drop their last tensors while Python is torn down abort (pytorch issue 190489). Owned
        # matrices see to it by themselves.
        time.sleep(0.1)


if __name__ == "__main__":
    main()
