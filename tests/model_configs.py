"""Configurations of the tiny models of `tests.models`.

One of each family the torch engine serves, small enough to be fast.

The families differ on purpose: heads in groups of 1, 2 and 3, a head size that is not hidden /
heads, biases, tied and untied heads, windows and routings shorter than the prompts of the tests.
What is special about a family is set so that it counts: `tests/engine/torch/test_families.py` holds
that the output changes without it.
"""

from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

VOCAB_SIZE = 384
"""Rows of every embedding table.

Ids 0-2 are `END`, `TURN` and `TURN_END`, the tokenizer uses the first few hundred.
"""

EOS_ID = 2
"""What the configurations name as the end of the output."""

WINDOW = 24
"""Positions that sliding layers see."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "original_max_position_embeddings": 64,
    },
}
"""Multi-head latent attention, and experts in groups."""

DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
"""Three layers of the gated delta rule, whose states fit into pages of 16 positions, and one of attention."""

_SPARSE = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}

_FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"hidden_size": 48, "num_attention_heads": 6}),
    "llama2": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama3": (
        LlamaConfig,
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "qwen2": (Qwen2Config, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen2_moe": (
        Qwen2MoeConfig,
        {
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3": (
        Qwen3Config,
        {"hidden_size": 48, "intermediate_size": 112, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "head_dim": 24,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_next": (
        Qwen3NextConfig,
        {
            **DELTA,
            **_SPARSE,
            "mlp_only_layers": [1],
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5_text": (
        Qwen3_5TextConfig,
        {
            **DELTA,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
    ),
    "qwen3_5_moe_text": (
        Qwen3_5MoeTextConfig,
        {
            **DELTA,
            **_SPARSE,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
    ),
    "mixtral": (
        MixtralConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "gemma": (GemmaConfig, {"num_key_value_heads": 1, "head_dim": 24, "tie_word_embeddings": True}),
    "gemma2": (
        Gemma2Config,
        {
            "num_hidden_layers": 3,
            "head_dim": 24,
            "query_pre_attn_scalar": 10,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": (
        Gemma3TextConfig,
        {
            "num_hidden_layers": 3,
            "head_dim": 24,
            "query_pre_attn_scalar": 10,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "tie_word_embeddings": True,
        },
    ),
    "gemma4_text": (
        Gemma4TextConfig,
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 0,
            "sliding_window": WINDOW,
            "layer_types": [*_ALTERNATING, "full_attention"],
            "final_logit_softcapping": 3.0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "hidden_size_per_layer_input": 0,
            "tie_word_embeddings": True,
        },
    ),
    "llama4_text": (
        Llama4TextConfig,
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 40,
            "floor_scale": 32,
            "no_rope_layer_interval": 4,
            "layer_types": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "phi": (
        PhiConfig,
        {
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3": (Phi3Config, {"sliding_window": WINDOW}),
    "deepseek_v2": (
        DeepseekV2Config,
        {
            **_LATENT,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
        },
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        {**_LATENT, "q_lora_rank": 24, "n_shared_experts": 1, "rope_interleave": True},
    ),
    "gpt_oss": (
        GptOssConfig,
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}

FAMILIES = tuple(_FAMILIES)


def config_of(family: str, **options: Any) -> PreTrainedConfig:
    """The configuration of a tiny model of `family`, with `options` instead of its own where they differ."""
    kind, own = _FAMILIES[family]
    return kind(**{**_COMMON, **own, **options})
