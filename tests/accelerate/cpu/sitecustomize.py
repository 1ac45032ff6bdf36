"""Lets Accelerate run FSDP2 on CPUs, for tests alone. Python imports this file if its folder is on PYTHONPATH.

Accelerate decides from the hardware what a process is. Without a GPU it takes a launched process for a lone one, so
that each trains for itself, or with ``--cpu`` for one of DDP; FSDP2 it runs on accelerators only. Everything below that
decision works on CPUs, with gloo. So here a launched process is told that it is of the multi-GPU kind, and that its
device is the CPU. Nothing else of Accelerate is changed, and the packages never do this.
"""

import importlib.abc
import importlib.machinery
import os
import sys


def let_cpus_count_as_gpus():
    """In this process, which has imported Accelerate."""
    from accelerate.state import DistributedType, PartialState

    decide = PartialState._prepare_backend

    def prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        if int(os.environ.get("LOCAL_RANK", -1)) == -1 or cpu:
            return decide(self, cpu, sagemaker_dp, backend)
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = prepare_backend
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls the above right after ``accelerate.state`` was imported, and slows no other program down."""

    def find_spec(self, name, path, target=None):
        if name != "accelerate.state":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            let_cpus_count_as_gpus()

        spec.loader.exec_module = exec_module
        return spec


# Only for what `accelerate launch` has started: it must itself see the machine as it is.
if "LOCAL_RANK" in os.environ:
    sys.meta_path.insert(0, _AfterImport())
