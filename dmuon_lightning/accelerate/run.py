"""Runs a script or a module with DMuon enabled: ``accelerate launch ... -m dmuon_lightning.accelerate.run train.py``.

python -m dmuon_lightning.accelerate.run train.py [argument ...]
python -m dmuon_lightning.accelerate.run -m package.train [argument ...]
"""

from __future__ import annotations

import os
import runpy
import sys

from dmuon_lightning.accelerate import enable, guard


def main(arguments: list[str]) -> None:
    """Run what ``arguments`` name, as ``python`` would.

    Raises:
        RuntimeError: no launcher has started this process, or no model was prepared with owned matrices at the end.
    """
    is_module = arguments[:1] == ["-m"]
    script = arguments[1:] if is_module else arguments
    if not script:
        raise SystemExit(__doc__)
    if "LOCAL_RANK" not in os.environ and "ACCELERATE_USE_FSDP" not in os.environ:
        # Known before hours of training, other than what is checked at the end.
        raise RuntimeError(
            "nothing has launched this process, so Accelerate will not shard its model: start it with "
            "accelerate launch --config_file ... -m dmuon_lightning.accelerate.run, or run the script itself"
        )
    enable()
    sys.argv[:] = script
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(script[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script[0]))
        runpy.run_path(script[0], run_name="__main__")
    guard.check_converted()


if __name__ == "__main__":
    main(sys.argv[1:])
