"""enable(): DMuon in scripts that do not build the Accelerator themselves, such as those of the Trainer."""

from __future__ import annotations

from typing import Any

from accelerate.utils import FullyShardedDataParallelPlugin

from dmuon_lightning.accelerate import guard
from dmuon_lightning.accelerate.config import read_config
from dmuon_lightning.accelerate.options import check_muon_options, checked_options, differing, flat
from dmuon_lightning.accelerate.plugin import DMuonPlugin


def enable(**options: Any) -> None:
    """From now on every FSDP plugin that is built, by whomever, is a :class:`DMuonPlugin` with these options. Local.

    Call it on every process, before the Accelerator or the Trainer is built. An optimizer step without a model that was
    prepared with owned matrices is then an error.

    Args:
        options: what :class:`DMuonPlugin` adds to ``FullyShardedDataParallelPlugin``.

    A second call adds its options to those of the first one.

    Raises:
        ValueError: an option of ``options``, or of the configuration, that does not exist or cannot have its value; one
            that has another value since an earlier call, or in the plugin of the Accelerator that there is already.
    """
    options = checked_options(options, "enable")
    read_config()
    earlier = flat(DMuonPlugin.defaults)
    _check_agrees(options, earlier, "an earlier enable() has said otherwise: call it once")
    active = guard.active_plugin()
    if active is not None:
        late = "the Accelerator is there already, and keeps its plugin: call enable() before it is built"
        _check_agrees(options, active.options, late, missing_differs=True)
    muon = {**DMuonPlugin.defaults.get("muon", {}), **options.get("muon", {})}
    check_muon_options(muon)
    DMuonPlugin.defaults = {**DMuonPlugin.defaults, **options, "muon": muon}
    # The one seam that leads from the outside to what others build: a class says of what type its instances are.
    FullyShardedDataParallelPlugin.__new__ = _new
    guard.expect("dmuon_lightning.accelerate was enabled")


def _check_agrees(options: dict[str, Any], others: dict[str, Any], why: str, missing_differs: bool = False) -> None:
    wanted = flat(options)
    for name in differing(wanted, {name: others[name] for name in others if name in wanted}):
        if name in others or missing_differs:
            raise ValueError(f"enable(): {name}={wanted[name]!r} would have no effect: {why}")


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    if cls is not FullyShardedDataParallelPlugin:
        return object.__new__(cls)
    plugin = object.__new__(DMuonPlugin)
    plugin.was_enabled = True  # type: ignore[misc]
    return plugin
