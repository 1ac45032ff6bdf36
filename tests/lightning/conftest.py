"""Settings of the Lightning tests."""

from __future__ import annotations

import importlib.util

from tests.distributed import harness

if importlib.util.find_spec("lightning") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # The fork server imports it once, instead of every rank on its own.
    harness._PRELOAD.append("lightning.pytorch")
