"""Tiny models with audio and random weights, one of each family the torch engine serves.

    audio("voxtral")        a cached directory: weights, configuration, extractor, tokenizer

Encoders hear two seconds at a time. Weights are drawn wide, as in `tests.vision_models`.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedConfig, WhisperFeatureExtractor

from tests.model_configs import EOS_ID
from tests.models import models_root
from tests.vision_models import _TEXT, IMAGE, _draw, _save_tokenizer

RATE, HOP = 16000, 160
"""Samples a second that the encoders take, and from one frame of a spectrum to the next."""

STATES = 100
"""Of an encoder, two frames each."""

AUDIO = IMAGE
"""Id of the token that stands for rows of audio."""


def _qwen2_audio() -> PreTrainedConfig:
    tower = transformers.Qwen2AudioEncoderConfig(
        num_mel_bins=16,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=48,
        d_model=32,
        max_source_positions=STATES,
        scale_embedding=False,
    )
    return transformers.Qwen2AudioConfig(
        audio_config=tower.to_dict(),
        text_config=transformers.Qwen2Config(**_TEXT).to_dict(),
        audio_token_index=AUDIO,
    )


def _voxtral() -> PreTrainedConfig:
    tower = transformers.VoxtralEncoderConfig(
        num_mel_bins=16,
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_source_positions=STATES,
    )
    return transformers.VoxtralConfig(
        audio_config=tower.to_dict(),
        text_config=transformers.LlamaConfig(**_TEXT).to_dict(),
        audio_token_id=AUDIO,
    )


_FAMILIES: dict[str, tuple[Callable[[], PreTrainedConfig], tuple[str, ...]]] = {
    "qwen2_audio": (_qwen2_audio, ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")),
    "voxtral": (_voxtral, ("[AUDIO]", "[BEGIN_AUDIO]")),
}

AUDIO_FAMILIES = tuple(_FAMILIES)


def extractor() -> Any:
    """The feature extractor of all of them."""
    return WhisperFeatureExtractor(
        feature_size=16, sampling_rate=RATE, hop_length=HOP, chunk_length=2 * STATES * HOP // RATE
    )


@cache
def audio(family: str) -> Path:
    """The directory of a tiny model of `family`, made once and shared; treat it as read-only."""
    make, names = _FAMILIES[family]
    config = make()
    directory = models_root() / f"{family}-audio"
    kind = getattr(transformers, MODELS[family])
    state = torch.random.get_rng_state()
    torch.manual_seed(20261123)
    try:
        model = kind(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _draw(name, parameter)
    finally:
        torch.random.set_rng_state(state)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=0)
    model.save_pretrained(directory)
    extractor().save_pretrained(directory)
    _save_tokenizer(directory, names)
    return directory


MODELS = {
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "voxtral": "VoxtralForConditionalGeneration",
}
"""transformers' class of each family."""
