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
    prepared with owned matrices is then an error. A second call adds its options to those of the first one.

    Args:
        options: what :class:`DMuonPlugin` adds to ``FullyShardedDataParallelPlugin``.

    Raises:
        ValueError: an option of ``options``, or of the configuration, that does not exist or cannot have its value; one
            that has another value since an earlier call, or in the plugin of the Accelerator that there is already.
    """
    options = checked_options(options, "enable")
    read_config()
    wanted, earlier = flat(options), flat(DMuonPlugin.defaults)
    again = {name: value for name, value in wanted.items() if name in earlier}
    _check_agrees(again, earlier, "an earlier enable() has said otherwise: call it once")
    active = guard.active_plugin()
    if active is not None:
        late = "the Accelerator is there already, and keeps its plugin: call enable() before it is built"
        _check_agrees(wanted, active.options, late)
    muon = {**DMuonPlugin.defaults.get("muon", {}), **options.get("muon", {})}
    check_muon_options(muon)
    DMuonPlugin.defaults = {**DMuonPlugin.defaults, **options, "muon": muon}
    # The one seam that leads from the outside to what others build: a class says of what type its instances are.
    FullyShardedDataParallelPlugin.__new__ = _new
    guard.expect("dmuon_lightning.accelerate was enabled")


def _check_agrees(wanted: dict[str, Any], settled: dict[str, Any], why: str) -> None:
    for name in differing(wanted, {name: value for name, value in settled.items() if name in wanted}):
        raise ValueError(f"enable(): {name}={wanted[name]!r} would have no effect: {why}")


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    if cls is not FullyShardedDataParallelPlugin:
        return object.__new__(cls)
    plugin = object.__new__(DMuonPlugin)
    plugin.was_enabled = True  # type: ignore[misc]
    return plugin
