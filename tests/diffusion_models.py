"""Tiny diffusers pipelines with random weights, large enough to show a mistake, as directories."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

_ALPHABET = sorted(ByteLevel.alphabet())


def save_stable_diffusion(directory: Path, scheduler: Any = None) -> Path:
    """Write a StableDiffusionPipeline: images of 32 pixels, latents of 4 x 16 x 16."""
    torch.manual_seed(1)
    tokenizer = _clip_tokenizer()
    unet = UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    pipeline = StableDiffusionPipeline(
        vae=_autoencoder(),
        text_encoder=_clip_encoder(len(tokenizer)),
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler or DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    return _saved(pipeline, directory)


def save_flux(directory: Path) -> Path:
    """Write a FluxPipeline, with an embedded guidance scale."""
    torch.manual_seed(2)
    tokenizer = _clip_tokenizer()
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
    pieces += [(chr(code), -2.0) for code in range(33, 127)]
    tokenizer_2 = T5Tokenizer(vocab=pieces, extra_ids=0)
    tokenizer_2.model_max_length = 512
    t5 = T5Config(
        vocab_size=len(tokenizer_2),
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        vae=_autoencoder(shift_factor=0.1),
        text_encoder=_clip_encoder(len(tokenizer)),
        tokenizer=tokenizer,
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=tokenizer_2,
        transformer=transformer,
    )
    return _saved(pipeline, directory)


def save_qwen_image(directory: Path) -> Path:
    """Write a QwenImagePipeline."""
    torch.manual_seed(3)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {symbol: index for index, symbol in enumerate([*_ALPHABET, *names])}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[])
    text = {
        "vocab_size": len(vocab),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    config = Qwen2_5_VLConfig(text_config=text, vision_config={**vision, "out_hidden_size": 32})
    pipeline = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 1],
            num_res_blocks=1,
            temperal_downsample=[False],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.5, 0.8, 1.1, 0.9],
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=tokenizer,
        transformer=QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 6, 6),
        ),
    )
    return _saved(pipeline, directory)


def _clip_tokenizer() -> Any:
    symbols = [*_ALPHABET, *(f"{symbol}</w>" for symbol in _ALPHABET)]
    symbols += ["<|startoftext|>", "<|endoftext|>"]
    vocab = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = CLIPTokenizer(vocab=vocab, merges=[])
    tokenizer.model_max_length = 24
    return tokenizer


def _clip_encoder(vocab_size: int) -> Any:
    config = CLIPTextConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=24,
        projection_dim=32,
        bos_token_id=vocab_size - 2,
        eos_token_id=vocab_size - 1,
        pad_token_id=vocab_size - 1,
    )
    return CLIPTextModel(config)


def _autoencoder(**config: Any) -> Any:
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        sample_size=32,
        **config,
    )


def _saved(pipeline: Any, directory: Path) -> Path:
    for module in pipeline.components.values():
        if isinstance(module, torch.nn.Module):
            for name, parameter in module.named_parameters():
                if parameter.ndim > 1:
                    scale = 1.5 if "embed" in name else 1.2
                    parameter.data.normal_(0, scale / parameter[0].numel() ** 0.5)
    pipeline.save_pretrained(directory)
    return directory
