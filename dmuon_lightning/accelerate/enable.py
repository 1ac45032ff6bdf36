"""enable(): DMuon in scripts that do not build the Accelerator themselves, such as those of the Trainer."""

from __future__ import annotations

from typing import Any

from accelerate.utils import FullyShardedDataParallelPlugin

from dmuon_lightning.accelerate import guard
from dmuon_lightning.accelerate.config import read_config
from dmuon_lightning.accelerate.plugin import DMuonPlugin


def enable(**options: Any) -> None:
    """From now on every FSDP plugin that is built, by whomever, is a :class:`DMuonPlugin` with these options. Local.

    Call it on every process, before the Accelerator or the Trainer is built. An optimizer step without a model that was
    prepared with owned matrices is then an error.

    Args:
        options: what :class:`DMuonPlugin` adds to ``FullyShardedDataParallelPlugin``.

    Raises:
        ValueError: an option of ``options``, or of the configuration, that does not exist or cannot have its value.
    """
    DMuonPlugin.check_options(options)
    read_config()
    DMuonPlugin.defaults = options
    # The one seam that leads from the outside to what others build: a class says of what type its instances are.
    FullyShardedDataParallelPlugin.__new__ = _new
    guard.expect("dmuon_lightning.accelerate was enabled")


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    return object.__new__(DMuonPlugin if cls is FullyShardedDataParallelPlugin else cls)
