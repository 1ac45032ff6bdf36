"""A script of the Trainer of transformers and of TRL, as users have them: `hf.py WAY FOLDER START`.

Not a test by itself. The run of one process writes the first weights to START, the others read them from there.

WAY is "configured" (an Accelerator of one's own, whose state the Trainer takes over), "enable", or "" (no line about
DMuon but the optimizer, for one process and for `-m dmuon_lightning.accelerate.run`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers.training_args
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from dmuon_lightning.accelerate import DMuonPlugin, DMuonTrainerOptimizer, prepare_trainer

VOCAB, SEQ, ROWS, STEPS = 29, 9, 48, 4
GLOBAL_BATCH = 8


def llama() -> Any:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=SEQ, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> Any:
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def lora() -> Any:
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], lora_dropout=0.0, init_lora_weights=False)
    return get_peft_model(llama(), config)


MODELS = {"llama": llama, "gpt2": gpt2, "lora": lora, "bf16": llama, "sft": llama}
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    "gpt2": {"gradient_checkpointing": True},
    "lora": {},
    "bf16": {"bf16": True},
    "sft": {},
}
# Saved and read again, as most models come; with the launcher's file only the first rank's weights count.
PRETRAINED = ("llama", "gpt2")
RESUMED = ("gpt2", "lora")


def rows() -> list[dict[str, list[int]]]:
    text = torch.randint(1, VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(3)).tolist()
    return [{"input_ids": line, "labels": line} for line in text]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, **{f"w{index}": index for index in range(1, VOCAB)}}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<pad>", unk_token="<pad>")


def arguments(kind: Any, way: str, folder: Path, world: int, **options: Any) -> Any:
    accumulate = options.get("gradient_accumulation_steps", 1)
    return kind(
        output_dir=str(folder),
        per_device_train_batch_size=GLOBAL_BATCH // world // accumulate,
        per_device_eval_batch_size=GLOBAL_BATCH // world,
        learning_rate=0.02,
        weight_decay=0.1,
        lr_scheduler_type="linear",
        warmup_steps=1,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
        accelerator_config={"use_configured_state": way == "configured"},
        **{"max_steps": STEPS, "save_strategy": "no", **options},
    )


def trainer_for(name: str, way: str, folder: Path, world: int, **options: Any) -> Trainer:
    torch.manual_seed(1)
    options = {**OPTIONS[name], **options}
    if name == "sft":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        args = arguments(SFTConfig, way, folder, world, max_length=SEQ, bf16=False, **options)
        data = Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows()])
        more: dict[str, Any] = {"processing_class": tokenizer(), "train_dataset": data, "eval_dataset": data}
        kind = SFTTrainer
    else:
        args = arguments(TrainingArguments, way, folder, world, **options)
        more = {"train_dataset": rows(), "eval_dataset": rows()[:16]}
        kind = Trainer
    # In bfloat16 a rounding error of a gradient becomes one of 1e-2 in Newton-Schulz.
    optimizer = (DMuonTrainerOptimizer, {"args": args, "ns_dtype": torch.float32})
    model = MODELS[name]()
    if name in PRETRAINED and len(sys.argv) > 3:
        start = Path(sys.argv[3]) / name
        if world == 1:
            model.save_pretrained(start)
        model = AutoModelForCausalLM.from_pretrained(start)
    return kind(model=model, args=args, optimizer_cls_and_kwargs=optimizer, **more)


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def norms(trainer: Trainer) -> list[float]:
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def run(way: str, folder: Path) -> dict[str, Any]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    found: dict[str, Any] = {}
    if way == "configured":
        from accelerate import Accelerator

        Accelerator(fsdp_plugin=DMuonPlugin(state_dict_type="FULL_STATE_DICT"))
    elif way == "enable":
        from dmuon_lightning.accelerate import enable

        enable()
    # TrainingArguments take bf16 on GPUs alone.
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    for name in MODELS:
        if way == "configured" and name == "bf16":
            continue  # the one Accelerator has one precision
        trainer = trainer_for(name, way, folder / name, world)
        found[name] = {"first": None}
        seen: set[str] = set()
        trainer.model.get_input_embeddings().register_forward_hook(
            lambda m, a, out, seen=seen: seen.add(str(m.weight.dtype))
        )
        if name == "llama":
            if world > 1:
                prepare_trainer(trainer)
            found[name]["first"] = trainer.evaluate()["eval_loss"]
        trainer.train()
        found[name].update(losses=losses(trainer), norms=norms(trainer), last=trainer.evaluate()["eval_loss"])
        found[name]["owned"] = owned(trainer.model)
        found[name]["dtypes"] = [sorted(seen), sorted({str(p.dtype) for p in trainer.model.parameters()})]
        if name == "lora":
            found[name]["trained"] = [n for n, p in trainer.model.named_parameters() if p.requires_grad]
        if name in ("gpt2", "llama"):
            trainer.save_model(str(folder / name / "saved"))
            if trainer.accelerator.is_main_process:
                loaded = AutoModelForCausalLM.from_pretrained(folder / name / "saved")
                ids = torch.tensor([row["input_ids"] for row in rows()[:16]])
                with torch.no_grad():
                    found[name]["reloaded"] = loaded(input_ids=ids, labels=ids).loss.item()
                    found[name]["tied"] = loaded.lm_head.weight is loaded.get_input_embeddings().weight
            trainer.accelerator.wait_for_everyone()
    half = {"save_strategy": "steps", "save_steps": 2}
    for name in RESUMED:
        trainer_for(name, way, folder / f"half-{name}", world, **half).train()
        resumed = trainer_for(name, way, folder / f"half-{name}", world, **half)
        resumed.train(resume_from_checkpoint=str(folder / f"half-{name}" / "checkpoint-2"))
        found[name]["resumed"] = losses(resumed)
        if name == "gpt2":
            resumed.args.max_steps = 2 * STEPS  # train() once more, on the model that is prepared
            resumed.train()
            found["again"] = losses(resumed)
    return found


def owned(model: Any) -> list[str]:
    from dmuon_core import OwnedTensor

    return [name for name, p in model.named_parameters() if isinstance(p, OwnedTensor)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[2])
    report = run(sys.argv[1], where)
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    (where / f"report.{rank}").write_text(json.dumps(report))
