"""Muon for ``transformers.Trainer`` and what derives from it, such as the trainers of TRL."""

from __future__ import annotations

from typing import Any

import torch.nn as nn

from dmuon_lightning.accelerate.optimizer import Muon, muon_groups, muon_options
from dmuon_lightning.accelerate.options import check_muon_options


class DMuonTrainerOptimizer:
    """``Trainer(optimizer_cls_and_kwargs=(DMuonTrainerOptimizer, {"args": args}))``: Muon, and AdamW for the rest.

    Learning rate, weight decay, betas and epsilon come from the ``TrainingArguments``, for both algorithms. So that one
    learning rate fits both, Muon's updates are scaled to the size of AdamW's (``adjust_lr_fn="match_rms_adamw"``).
    Norms and biases have no weight decay, as in the Trainer. Other options of
    :class:`~dmuon_lightning.accelerate.Muon` may stand beside ``args``; they win, as do those of the plugin and of the
    configuration.
    """

    def __call__(self, model: nn.Module, *, args: Any = None, **options: Any) -> Muon:
        """Build the optimizer; called by the Trainer, before it prepares ``model``. Local.

        Raises:
            TypeError: ``args`` is missing.
            ValueError: an option that Muon does not have, with the nearest one; a value that it cannot have.
        """
        if args is None:
            raise TypeError(
                "DMuonTrainerOptimizer needs the TrainingArguments: pass "
                'optimizer_cls_and_kwargs=(DMuonTrainerOptimizer, {"args": args})'
            )
        from transformers import Trainer

        check_muon_options(options)
        options = {**_options_of(args), **muon_options(), **options}
        groups = muon_groups(model, options.pop("split", None), options.pop("groups", None))
        decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
        if groups[-1]["algorithm"] == "adamw":
            rest = groups.pop()["params"]
            split = {
                "adamw": [(name, param) for name, param in rest if name in decayed],
                "adamw_no_decay": [(name, param) for name, param in rest if name not in decayed],
            }
            for name, params in split.items():
                if params:
                    decay = {"weight_decay": 0.0} if name == "adamw_no_decay" else {}
                    groups.append({"name": name, "algorithm": "adamw", "params": params, **decay})
        return Muon(groups, **options)


def prepare_trainer(trainer: Any) -> None:
    """Prepare the model and the optimizer of a Trainer now, for an ``evaluate`` or ``predict`` before ``train``.

    Accelerate prepares a model for FSDP2 only together with its optimizer, which the Trainer makes in ``train``.
    Collective.
    """
    trainer.create_optimizer()
    trainer.model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped = trainer.model


def _options_of(args: Any) -> dict[str, Any]:
    return {
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "adjust_lr_fn": "match_rms_adamw",
        "adamw_lr": args.learning_rate,
        "adamw_betas": (args.adam_beta1, args.adam_beta2),
        "adamw_eps": args.adam_epsilon,
        "adamw_weight_decay": args.weight_decay,
    }
