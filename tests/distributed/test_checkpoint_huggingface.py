"""Trained weights of Hugging Face models as safetensors, read by ``from_pretrained``; tiny random models."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon_core
from tests.distributed.checkpoints import WHOLE, assert_same
from tests.distributed.harness import run_distributed
from tests.distributed.reference import full_weights, make_muon

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]
VOCABULARY = 31


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def _sharded(model: nn.Module, wrapped: bool) -> nn.Module:
    if wrapped:
        layers: Any = model.model.layers
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer)
        model.lm_head = torch.compile(model.lm_head, backend="eager")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dmuon_core.dedicate_params(model, mesh)
    for block in dmuon_core.default_boundaries(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _train(model: nn.Module) -> torch.Tensor:
    optimizer = make_muon(model)
    tokens = torch.randint(0, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(9)[None]).logits


def _through_from_pretrained(folder: str, build: Any, wrapped: bool) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    plain = build()
    names, tied = set(plain.state_dict()), plain.config.tie_word_embeddings
    kind, config = type(plain), plain.config
    model = _sharded(plain, wrapped)
    logits = _train(model)
    weights = get_model_state_dict(model, options=WHOLE)
    if dist.get_rank() == 0:
        assert set(weights) == names
        config.save_pretrained(folder)
        save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
        loaded, report = kind.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
        assert_same(dict(loaded.state_dict()), weights)
        if tied:
            assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        with torch.no_grad():
            torch.testing.assert_close(loaded(input_ids=torch.arange(9)[None]).logits, logits, rtol=0, atol=1e-6)
    # And back: a pretrained model starts a run.
    dist.barrier()
    torch.manual_seed(5)
    other = _sharded(build(), wrapped)
    state = kind.from_pretrained(folder).state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(other, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert_same(full_weights(other), full_weights(model))


def _models(folder: str) -> None:
    for name, build, wrapped in (("llama", _llama, False), ("wrapped", _llama, True), ("gpt2", _gpt2, False)):
        _through_from_pretrained(f"{folder}/{name}", build, wrapped)


def test_from_pretrained(tmp_path: Any) -> None:
    run_distributed(_models, 2, str(tmp_path))
