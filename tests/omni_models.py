"""A tiny model of Qwen2.5-Omni's family with random weights: thinker, talker and token2wav.

    omni()        a cached directory: weights, configuration, speakers, tokenizer

Weights are drawn wide, so that a wrong row, position or code shows.
"""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import GenerationConfig

from tests.audio_models import extractor
from tests.model_configs import EOS_ID, VOCAB_SIZE
from tests.models import models_root
from tests.vision_models import _MROPE, _NORM, _TEXT, VIDEO_SETTINGS, _draw, _save_tokenizer

SPEAKERS = {"Chelsie": 370, "Ethan": 371}
"""The voices, with the id that begins the text of each."""
CODES = 40
"""Codes of sound; the talker has six further ids, which its random weights choose too."""
_PAD, _START, _END, _MASK = CODES + 1, CODES + 2, CODES + 3, CODES + 5
MEDIA = {"audio": 380, "image": 381, "video": 382}
"""Ids of the tokens that stand for rows of each kind of media."""
AROUND = {"audio": (375, 376), "image": (377, 378), "video": (377, 378)}
"""Ids of the tokens around them, by which transformers finds them."""
_IDS = {
    **{f"{kind}_token_index": id_ for kind, id_ in MEDIA.items()},
    "audio_start_token_id": AROUND["audio"][0],
    "audio_end_token_id": AROUND["audio"][1],
    "vision_start_token_id": AROUND["image"][0],
    "vision_end_token_id": AROUND["image"][1],
}
_TALKER = {
    **_IDS,
    "spatial_merge_size": 2,
    "vocab_size": CODES + 6,
    "tts_text_start_token_id": 372,
    "tts_text_end_token_id": 373,
    "tts_text_pad_token_id": 374,
    "tts_codec_start_token_id": _START,
    "tts_codec_end_token_id": _END,
    "tts_codec_pad_token_id": _PAD,
    "tts_codec_mask_token_id": _MASK,
    "embedding_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": _MROPE,
}
_DIT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "emb_dim": 16,
    "head_dim": 16,
    "block_size": 8,
    "look_ahead_layers": [1],
    "look_backward_layers": [0, 2],
    "num_embeds": CODES + 6,
    "mel_dim": 8,
    "enc_emb_dim": 8,
    "enc_dim": 8,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_attention_channels": 8,
    "enc_se_channels": 8,
}
_VOCODER = {
    "mel_dim": 8,
    "upsample_initial_channel": 16,
    "resblock_kernel_sizes": [3, 5],
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
    "upsample_rates": [5, 2],
    "upsample_kernel_sizes": [11, 4],
}


_TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'text' %}{{ part.text }}
{%- elif part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>
{%- elif part.type == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>
{%- else %}<|vision_bos|><|VIDEO|><|vision_eos|>{% endif %}
{%- endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""As the published one, without a system message of its own."""


def _config() -> Any:
    tower: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 4}
    tower |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}
    # Chunks of 0.4 s.
    ear = {"num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "n_window": 20}
    return transformers.Qwen2_5OmniConfig(
        thinker_config={
            "text_config": {**_TEXT, "rope_parameters": _MROPE},
            "vision_config": {**tower, "out_hidden_size": 64},
            "audio_config": {**ear, "encoder_ffn_dim": 48, "d_model": 32, "output_dim": 64},
            **_IDS,
        },
        talker_config=_TALKER,
        token2wav_config={"dit_config": _DIT, "bigvgan_config": _VOCODER},
    )


@cache
def omni() -> Path:
    """The directory of the model, made once and shared; treat it as read-only."""
    directory = models_root() / "qwen2_5_omni"
    state = torch.random.get_rng_state()
    torch.manual_seed(20261126)
    try:
        model = transformers.Qwen2_5OmniForConditionalGeneration(_config())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not name.startswith("token2wav"):
                    _draw(name.removeprefix("thinker."), parameter)
                elif parameter.ndim > 1:
                    scale = 1.3 / parameter[0].numel() ** 0.5
                    # Else it would be clipped.
                    scale *= 0.005 if name.endswith("conv_post.weight") else 1
                    parameter.copy_(scale * torch.randn_like(parameter))
                else:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        speakers = {
            name: {"bos_token": bos, "cond": torch.randn(1, 8), "ref_mel": torch.randn(1, 30, 8)}
            for name, bos in SPEAKERS.items()
        }
    finally:
        torch.random.set_rng_state(state)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=0)
    model.save_pretrained(directory)
    # As published, and as docs/pipelines.md says to write it for inlay.
    torch.save(speakers, directory / "spk_dict.pt")
    parts = {
        f"{name}.{part}": torch.as_tensor(value)
        for name, parts in speakers.items()
        for part, value in parts.items()
    }
    save_file(parts, directory / "speakers.safetensors")
    image = transformers.Qwen2VLImageProcessorPil(
        size={"shortest_edge": 16 * 16, "longest_edge": 48 * 48}, patch_size=4, **_NORM
    )
    # As published, one file has the settings of both.
    both = {**extractor().to_dict(), **image.to_dict(), "processor_class": "Qwen2_5OmniProcessor"}
    (directory / "preprocessor_config.json").write_text(json.dumps(both))
    (directory / "video_preprocessor_config.json").write_text(json.dumps(VIDEO_SETTINGS))
    around = ("<|audio_bos|>", "<|audio_eos|>", "<|vision_bos|>", "<|vision_eos|>", "<unused379>")
    _save_tokenizer(directory, (*around, "<|AUDIO|>", "<|IMAGE|>", "<|VIDEO|>"), AROUND["audio"][0])
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    return directory


@cache
def whole() -> Any:
    """transformers' whole model of the directory, with its speakers."""
    model: Any = transformers.Qwen2_5OmniForConditionalGeneration.from_pretrained(omni())
    # A copy, for weights that are aligned in memory: others are added up in another order.
    return copy.deepcopy(model.eval())


assert max(SPEAKERS.values()) < VOCAB_SIZE
