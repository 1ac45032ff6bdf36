"""What DMuonPlugin does to a model between two steps of ``Accelerator.prepare``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from accelerate.state import AcceleratorState
from accelerate.utils import compare_versions
from accelerate.utils.fsdp_utils import get_parameters_from_modules
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import StateDictType

from dmuon_core import DedicatedModel, OwnedTensor, dedicate_params
from dmuon_core.optim.cost import flops_of
from dmuon_lightning.accelerate.selection import boundary_predicate
from dmuon_lightning.summary import describe

if TYPE_CHECKING:
    from dmuon_lightning.accelerate.plugin import DMuonPlugin

logger = logging.getLogger("dmuon_lightning.accelerate")


def make_mesh() -> DeviceMesh:
    """The mesh that Accelerate will pass to ``fully_shard``, or one equal to its default. Collective the first time.

    Raises:
        ValueError: there is other parallelism than data parallelism, or only replicas.
    """
    state = AcceleratorState()
    config = state.parallelism_config
    if config is None or state.device_mesh is None:
        return init_device_mesh(state.device.type, (state.num_processes,))
    for name in ("tp", "cp", "sp"):
        size = getattr(config, f"{name}_size")
        if size > 1:
            raise ValueError(
                f"DMuonPlugin is for data parallelism, not for parallelism_config with {name}_size={size}: set it to 1 "
                "and use dp_shard_size and dp_replicate_size"
            )
    if not config.dp_shard_enabled:
        raise ValueError(
            "DMuonPlugin needs ranks to spread owners over: set dp_shard_size in parallelism_config to 2 or more"
        )
    return state.device_mesh[tuple(config.fsdp_dim_names)]


def ignored_parameters(plugin: DMuonPlugin, model: nn.Module) -> set[nn.Parameter]:
    """The parameters that the user keeps from FSDP2, and so from owners. Local."""
    if plugin.ignored_modules is None:
        return set()
    return get_parameters_from_modules(plugin.ignored_modules, model, AcceleratorState().device)


def convert(plugin: DMuonPlugin, model: nn.Module) -> DedicatedModel:
    """Give the targets of ``model`` their owners, in place. Collective over the mesh.

    Raises:
        ValueError, RuntimeError: as :func:`dmuon_core.dedicate_params`, on every rank.
    """
    state = AcceleratorState()
    first_rank_only = bool(plugin.cpu_ram_efficient_loading)
    before = dict(model.named_parameters()) if first_rank_only and state.is_main_process else {}
    master = plugin.master_dtype
    dedicated = dedicate_params(
        model,
        make_mesh(),
        plugin.targets_in(model),
        hook_boundary_predicate=boundary_predicate(plugin.hook_boundary_predicate, model),
        hook_boundary_strict=plugin.hook_boundary_strict,
        reshard_after_forward=bool(plugin.reshard_after_forward),
        replicate_async=plugin.replicate_async,
        mp_policy=plugin.mixed_precision_policy,
        # With mixed precision Accelerate raises whatever is trained to float32.
        master_dtype=torch.float32 if master is None and state.mixed_precision != "no" else master,
        split=plugin.muon.get("split"),
        flops=flops_of(plugin.muon),
        max_owned_bytes=plugin.max_owned_bytes,
        sync_module_states=bool(plugin.sync_module_states) and not first_rank_only,
    )
    if first_rank_only:
        _load_from_first_rank(model, dedicated, before)
    if state.is_main_process:
        _say(describe(dedicated))
        _warn_of_adapters(plugin, model)
    return dedicated


def _load_from_first_rank(model: nn.Module, dedicated: DedicatedModel, before: dict[str, nn.Parameter]) -> None:
    """Let Accelerate's loader, which comes next, bring the first rank's weights to their owners.

    It takes a state dict, in which the first rank must have whole plain tensors, moves the model to meta, shards it,
    and loads tensors that are cut evenly; these become owned as soon as they are there, before the optimizer gets them.
    """
    plain = {fqn: param.detach() for fqn, param in before.items()}

    def give_whole(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        taken.remove()
        for key, value in state_dict.items():
            if isinstance(value, OwnedTensor) and value.fqn in plain:
                state_dict[key] = plain[value.fqn].to(value.dtype)

    def own_what_was_loaded(module: nn.Module, incompatible_keys: Any) -> None:
        loaded.remove()
        for param in dedicated.params:
            param.adopt_replaced_rest()

    taken = model.register_state_dict_post_hook(give_whole)
    loaded = model.register_load_state_dict_post_hook(own_what_was_loaded)


def _warn_of_adapters(plugin: DMuonPlugin, model: nn.Module) -> None:
    """Accelerate's error, with any FSDP2: of adapters it saves this rank's piece alone."""
    if (
        hasattr(model, "peft_config")
        and plugin.state_dict_type == StateDictType.FULL_STATE_DICT
        and compare_versions("accelerate", "<", "1.15")
    ):
        _say(
            "Accelerate before 1.15 does not save adapters whole with FULL_STATE_DICT, so that a Trainer cannot "
            "resume with them: upgrade Accelerate. What save_model writes is right"
        )


def _say(line: str) -> None:
    """Log one line that is seen without any setup of logging."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    logger.info(line)
