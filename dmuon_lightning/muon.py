"""Muon for scripts and config files that build their optimizer before the model is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from dmuon_core import Muon as CoreMuon
from dmuon_core import OwnedTensor
from dmuon_core.optim.muon import ParamsT
from dmuon_core.optim.split import SplitRule, carried, model_splits


class Muon(CoreMuon):
    """:class:`dmuon_core.Muon` that may also be given ``model.parameters()``, even of a model that is sharded later.

    ``LightningCLI`` builds its ``optimizer:`` so, and nothing but a tensor says then what will be a Muon target. The
    optimizer has two groups from the start, "muon" and "adamw", so that learning-rate schedulers can be built on it;
    when the strategy has sharded the model, it puts the owned matrices into the first and all others into the second.
    Frozen parameters are left out. Anything else works as in the base class, whose arguments these are.

    Raises:
        RuntimeError: in ``step``, if no strategy has come to sort the parameters.
    """

    def __init__(self, params: nn.Module | ParamsT, *args: Any, split: SplitRule | None = None, **kwargs: Any) -> None:
        self._unsorted = self._unnamed = False
        if not isinstance(params, nn.Module | torch.Tensor):
            listed: list[Any] = list(params)
            params = listed
            if all(isinstance(p, torch.Tensor) for p in listed):
                trainable = [p for p in listed if p.requires_grad]
                if any(map(_is_owned, trainable)) and not all(map(_is_owned, trainable)):
                    params, self._unnamed = _split(trainable, _is_owned), True
                elif not all(map(_is_matrix, trainable)):
                    params, self._unsorted, self._unnamed = _split(trainable, _is_matrix), True, True
        # Which matrices a parameter stands for goes by its name, which is not known yet.
        super().__init__(params, *args, split=None if self._unnamed else split, **kwargs)
        self.split = carried(split)
        if self._unsorted:
            self.register_step_pre_hook(_refuse_unsorted)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("split", "_unsorted", "_unnamed")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_unsorted" in state and self._unsorted:  # from copy or pickle, which leave hooks behind
            self.register_step_pre_hook(_refuse_unsorted)

    def sort_parameters(self, model: nn.Module, default: SplitRule | None = None) -> None:
        """Put owned matrices into the Muon group, all others into the AdamW group, if they came in one list. Local.

        Also divides them into matrices, now that ``model`` gives them names: by the optimizer's ``split``, or by
        ``default``.
        """
        if self._unsorted:
            params = [p for group in self.param_groups for p in group["params"]]
            for group, chosen in zip(self.param_groups, _split(params, _is_owned), strict=True):
                group["params"][:] = chosen["params"]
        if self._unnamed:
            specs = model_splits(model, default if self.split is None else self.split)
            by_param = {param: specs.get(name) for name, param in model.named_parameters()}
            for group in self.param_groups:
                if group["algorithm"] == "muon":
                    found = tuple(by_param.get(p) for p in group["params"])
                    group["split"] = found if any(found) else None
        self._unsorted = self._unnamed = False


def _refuse_unsorted(optimizer: Muon, args: Any, kwargs: Any) -> None:
    if optimizer._unsorted:
        raise RuntimeError(
            "dmuon_lightning.Muon was built from model.parameters(), and no DMuonStrategy has told it which of them "
            "are hidden matrices: train with that strategy, or pass the model itself"
        )


def _is_owned(param: torch.Tensor) -> bool:
    return isinstance(param, OwnedTensor)


def _is_matrix(param: torch.Tensor) -> bool:
    return param.ndim >= 2


def _split(params: list[Any], is_muon: Callable[[Any], bool]) -> list[dict[str, Any]]:
    chosen = {"muon": [p for p in params if is_muon(p)], "adamw": [p for p in params if not is_muon(p)]}
    return [{"name": name, "algorithm": name, "params": some} for name, some in chosen.items()]
