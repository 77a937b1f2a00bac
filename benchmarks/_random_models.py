"""Models with random weights of a published shape, for benchmarks."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

VOCABULARY = 151936
HEAD_SIZE = 128


@dataclass(frozen=True)
class Shape:
    """What differs between Qwen3's dense models."""

    layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int


SHAPES = {
    "0.6B": Shape(28, 1024, 3072, 16),
    "4B": Shape(36, 2560, 9728, 32),
}


def write_model(
    directory: Path, layers: int, *, shape: Shape = SHAPES["0.6B"], vocab_size: int = VOCABULARY
) -> None:
    """Write a Qwen3 of `layers` layers with random weights, in bfloat16."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=8,
        head_dim=HEAD_SIZE,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    noise = torch.empty(1 << 20, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
    for parameter in model.parameters():
        flat = parameter.data.view(-1)
        for start in range(0, len(flat), len(noise)):
            part = flat[start : start + len(noise)]
            # Rotated, so that no two blocks are equal.
            part.copy_(noise.roll(start >> 20)[: len(part)])
        if parameter.ndim == 1:
            parameter.data.fill_(1)
    model.tie_weights()
    model.save_pretrained(directory)


def write_quantised(source: Path, directory: Path, bits: int, *, head: bool) -> Path:
    """Write the same shape with integer weights of `bits` in groups of 128, as `pack-quantized`.

    The head stays in bfloat16, tied to the embedding table, unless `head`.
    """
    directory.mkdir()
    config = json.loads((source / "config.json").read_text())
    (file,) = source.glob("*.safetensors")
    generator = torch.Generator().manual_seed(2)
    plain = load_file(file)
    shapes = {name: value.shape for name, value in plain.items() if name.endswith("_proj.weight")}
    stored = {name: value for name, value in plain.items() if name not in shapes}
    if head:
        config["tie_word_embeddings"] = False
        shapes["lm_head.weight"] = stored["model.embed_tokens.weight"].shape
    for name, (outputs, inputs) in shapes.items():
        shape = (outputs, inputs * bits // 32)
        words = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator)
        scales = torch.full((outputs, inputs // 128), 0.064 / (1 << bits), dtype=torch.bfloat16)
        stored |= {
            f"{name}_packed": words.int(),
            f"{name}_shape": torch.tensor([outputs, inputs]),
            f"{name}_scale": scales,
        }
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 128}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory
