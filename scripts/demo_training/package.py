"""Writing and reading the files of `inlay.demo`."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from scripts.demo_training.tokenizer import END_OF_TEXT, TURN_END, write_tokenizer
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3ForCausalLM


def write_model(model: Qwen3ForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    """Write a model directory as `transformers` reads it, weights in bfloat16.

    Args:
        model: weights in float32 that bfloat16 holds exactly.
        tokenizer: its tokenizer.
        directory: made if it is not there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    config = model.config.to_dict()
    config["architectures"] = ["Qwen3ForCausalLM"]
    config["dtype"] = "bfloat16"
    config.pop("_name_or_path", None)
    _write_json(directory / "config.json", config)
    ends = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    _write_json(
        directory / "generation_config.json",
        {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1]},
    )
    write_tokenizer(tokenizer, directory)


def write_soft_prompt(
    rows: Tensor, safetensors_path: Path, peft_directory: Path, base_model: str
) -> None:
    """Write a soft prompt twice: one tensor alone, and as a PEFT prompt-tuning checkpoint.

    Args:
        rows: (rows, hidden) float32, in the scale of `inputs_embeds`.
        safetensors_path: file for the tensor alone, under the name `embeddings`.
        peft_directory: directory of the checkpoint; made if it is not there.
        base_model: what the checkpoint names as its base model.
    """
    rows = rows.detach().to(torch.float32).contiguous()
    save_file({"embeddings": rows}, str(safetensors_path))
    peft_directory.mkdir(parents=True, exist_ok=True)
    save_file({"prompt_embeddings": rows}, str(peft_directory / "adapter_model.safetensors"))
    _write_json(
        peft_directory / "adapter_config.json",
        {
            "peft_type": "PROMPT_TUNING",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "inference_mode": True,
            "num_virtual_tokens": rows.shape[0],
            "token_dim": rows.shape[1],
            "num_transformer_submodules": 1,
            "prompt_tuning_init": "RANDOM",
            "prompt_tuning_init_text": None,
            "tokenizer_name_or_path": None,
        },
    )


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
