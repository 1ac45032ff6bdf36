"""Plain FSDP2, without the packages of this project: `torchrun plain_fsdp2.py FOLDER REPORT`. Not a test by itself.

Loads what `save_state` wrote, weights and the moments of AdamW, into a model that `fully_shard` has sharded, and makes
one step of what is left to AdamW.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from tests.distributed.models import MODELS, batch_for, loss_of

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, report = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    torch.manual_seed(9)
    model = MODELS["gpt"]()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder / "pytorch_model_fsdp_0")
    set_model_state_dict(model, state["model"])
    name = "head.weight"
    moments = {"optimizer": {"state": {name: {"exp_avg": torch.empty_like(model.head.weight)}}}}
    dcp.load(moments, checkpoint_id=folder / "optimizer_0")
    inputs, target = batch_for("gpt", 2, 0, dist.get_rank(), dist.get_world_size())
    loss = loss_of(model(inputs), target, "tensor").detach()
    dist.all_reduce(loss)
    average = moments["optimizer"]["state"][name]["exp_avg"].full_tensor()
    if dist.get_rank() == 0:
        ours = [module for module in sys.modules if module.startswith("dmuon")]
        torch.save({"loss": loss.item() / dist.get_world_size(), "exp_avg": average, "ours": ours}, report)
    dist.destroy_process_group()
    # A thread of gloo that drops its last tensors while the interpreter is torn down aborts (pytorch issue 190489).
    time.sleep(0.1)
