"""The model that draws digits from captions, in the parts of Stable Diffusion, and its training."""

import copy
import logging
import math
import random
import time

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from scripts.painter_demo.captions import caption
from scripts.vision_demo.pictures import COLOURS, SIDE
from scripts.vision_demo.training import Pictures
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

LOGGER = logging.getLogger(__name__)

STEPS_DRAWN, GUIDANCE = 20, 3.0
"""Steps and scale of guidance with which pictures are drawn."""

MAX_POSITIONS = 24
"""Positions of a caption: a letter is one."""

LATENTS, SHRINK = 4, 2
"""Channels of a latent, and pixels of a picture for one of it in each direction."""

AUTOENCODER_BATCH, BATCH = 64, 128
AUTOENCODER_RATE, RATE = 3e-3, 2e-3
UNCONDITIONAL = 0.1
"""Share of captions left out, which guidance needs."""

AVERAGE = 0.997
"""Weight of what was, in the running average of weights that is kept."""

KL_WEIGHT = 1e-5

NAMES = tuple(COLOURS)


def build_tokenizer() -> CLIPTokenizer:
    """A tokenizer in which each letter is a token, apart where it ends a word."""
    letters = sorted(ByteLevel.alphabet())
    known = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={text: i for i, text in enumerate(known)}, merges=[])
    tokenizer.model_max_length = MAX_POSITIONS
    return tokenizer


def build_painter() -> StableDiffusionPipeline:
    """The parts with random weights in float32."""
    tokenizer = build_tokenizer()
    encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=MAX_POSITIONS,
            projection_dim=32,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    vae = AutoencoderKL(
        block_out_channels=(12, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=LATENTS,
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=SIDE,
    )
    unet = UNet2DConditionModel(
        sample_size=SIDE // SHRINK,
        in_channels=LATENTS,
        out_channels=LATENTS,
        block_out_channels=(24, 48),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    scheduler = DDIMScheduler(
        beta_schedule="squaredcos_cap_v2",
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        clip_sample=False,
        steps_offset=1,
        set_alpha_to_one=True,
    )
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def train_autoencoder(vae: AutoencoderKL, pictures: Pictures, steps: int) -> None:
    """Train to give pictures back, then set the factor that gives latents a deviation of 1."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=AUTOENCODER_RATE, weight_decay=0)
    began = time.process_time()
    for step in range(steps):
        pixels = pictures.draw(AUTOENCODER_BATCH)[0]
        posterior = vae.encode(pixels).latent_dist
        loss = F.mse_loss(vae.decode(posterior.sample()).sample, pixels)
        loss = loss + KL_WEIGHT * posterior.kl().mean()
        _step(loss, optimizer, vae, _rate(step, steps))
        if step % 100 == 0 or step == steps - 1:
            spent = time.process_time() - began
            LOGGER.info("autoencoder %4d loss %.4f, %.0f CPU s", step, loss.item(), spent)
    with torch.no_grad():
        latents = vae.encode(pictures.draw(1024)[0]).latent_dist.mode()
    vae.register_to_config(scaling_factor=round(1 / latents.std().item(), 4))
    vae.requires_grad_(False).eval()


def train_denoiser(
    painter: StableDiffusionPipeline, pictures: Pictures, steps: int, seed: int
) -> None:
    """Train text encoder and denoiser together to take noise off; their averages are kept.

    The target is the velocity of Salimans and Ho, "Progressive Distillation" (2022).
    """
    rng, noise_of = random.Random(seed), torch.Generator().manual_seed(seed)
    scheduler, vae = painter.scheduler, painter.vae
    trained = nn.ModuleList([painter.text_encoder, painter.unet]).train()
    kept = copy.deepcopy(trained).requires_grad_(False)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=RATE, betas=(0.9, 0.98))
    began, smooth = time.process_time(), math.nan
    for step in range(steps):
        pixels, digits, colours = pictures.draw(BATCH)
        with torch.no_grad():
            latents = vae.encode(pixels).latent_dist.mode() * vae.config.scaling_factor
        texts = [
            "" if rng.random() < UNCONDITIONAL else caption(int(digit), NAMES[colour], rng)
            for digit, colour in zip(digits, colours, strict=True)
        ]
        times = torch.randint(1000, (BATCH,), generator=noise_of)
        noise = torch.randn(latents.shape, generator=noise_of)
        noisy = scheduler.add_noise(latents, noise, times)
        target = scheduler.get_velocity(latents, noise, times)
        hidden = _encode(painter, texts)
        told = painter.unet(noisy, times, encoder_hidden_states=hidden).sample
        loss = F.mse_loss(told, target)
        _step(loss, optimizer, trained, _rate(step, steps))
        weight = min(AVERAGE, (step + 1) / (step + 10))
        with torch.no_grad():
            for old, new in zip(kept.parameters(), trained.parameters(), strict=True):
                old.lerp_(new, 1 - weight)
        smooth = loss.item() if math.isnan(smooth) else 0.97 * smooth + 0.03 * loss.item()
        if step % 100 == 0 or step == steps - 1:
            spent = time.process_time() - began
            LOGGER.info("denoiser %4d loss %.4f, %.0f CPU s", step, smooth, spent)
    trained.load_state_dict(kept.state_dict())
    trained.requires_grad_(False).eval()


def round_weights(painter: StableDiffusionPipeline) -> None:
    """Round weights to numbers that bfloat16 holds, as they are stored."""
    for part in (painter.text_encoder, painter.unet, painter.vae):
        part.to(torch.bfloat16).to(torch.float32)


def _encode(painter: StableDiffusionPipeline, texts: list[str]) -> Tensor:
    """Hidden states of captions, float32 [N, MAX_POSITIONS, hidden size]."""
    ids = painter.tokenizer(
        texts, padding="max_length", max_length=MAX_POSITIONS, truncation=True, return_tensors="pt"
    ).input_ids
    hidden: Tensor = painter.text_encoder(ids)[0]
    return hidden


def _rate(step: int, steps: int) -> float:
    """Share of the rate at a step: it rises first and then falls to nothing."""
    return min((step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def _step(loss: Tensor, optimizer: torch.optim.Optimizer, model: nn.Module, rate: float) -> None:
    """Go one step down the gradient of `loss`, at this share of the optimizer's rate."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * rate
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
