"""Tiny embedding models and cross-encoders with random weights, in sentence-transformers' layout, made once a session.

    tiny_embedding("bert")                      mean pooling, then length 1
    tiny_embedding("bge")                       a BERT whose first state counts, with a prompt for queries
    tiny_scoring("xlm-roberta")                 a cross-encoder

The families differ on purpose: pooling, Dense layers, token types, the first position's id,
windows, prompts.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    CamembertConfig,
    DistilBertConfig,
    ElectraConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    MPNetConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

from tests.scratch import scratch

_TEXT = (
    "the a harbour town counts its lanterns every night and writes number in book hello world what is capital of island it on "
    "hill how many ships sail south when wind cold north query : passage retrieve documents instruct question answer x y z"
)
WORDS = _TEXT.split()
"""The vocabulary after the special tokens; texts of these words lose nothing."""

_SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
VOCAB_SIZE = len(_SPECIAL) + len(WORDS)
MAX_LENGTH = 64

_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 80,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
_DECODER: dict[str, Any] = {
    **_ENCODER,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MEAN = {"pooling_mode_mean_tokens": True}
_CLS = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
_LAST = {"pooling_mode": "lasttoken"}

_CONFIGS: dict[str, Any] = {
    "bert": lambda **sizes: BertConfig(**_ENCODER | sizes),
    "bge": lambda **sizes: BertConfig(**_ENCODER | sizes),
    "e5": lambda **sizes: BertConfig(**_ENCODER | sizes),
    "roberta": lambda **sizes: RobertaConfig(**_ENCODER | sizes),
    "xlm-roberta": lambda **sizes: XLMRobertaConfig(**_ENCODER | sizes),
    "camembert": lambda: CamembertConfig(**_ENCODER),
    "electra": lambda: ElectraConfig(**_ENCODER, embedding_size=32),
    "distilbert": lambda: DistilBertConfig(
        vocab_size=VOCAB_SIZE, dim=48, n_layers=2, n_heads=4, hidden_dim=80, max_position_embeddings=80, pad_token_id=0
    ),
    "modernbert": lambda **sizes: ModernBertConfig(
        **_ENCODER | sizes, local_attention=16, global_attn_every_n_layers=2, reference_compile=False
    ),
    "mpnet": lambda: MPNetConfig(**_ENCODER | {"pad_token_id": 1, "bos_token_id": 0}),
    "qwen3": lambda **sizes: Qwen3Config(**_DECODER | sizes),
    "qwen2": lambda: Qwen2Config(**_DECODER),
    "llama": lambda: LlamaConfig(**_DECODER),
    "mistral": lambda: MistralConfig(**_DECODER, sliding_window=16),
    "gemma": lambda: Gemma3TextConfig(
        **_DECODER,
        query_pre_attn_scalar=16,
        sliding_window=8,
        use_bidirectional_attention=True,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip

_POOLING: dict[str, dict[str, Any]] = {
    "bert": _MEAN,
    "bge": _CLS,
    "e5": _MEAN,
    "roberta": {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
    "xlm-roberta": {"pooling_mode": ["weightedmean", "mean_sqrt_len_tokens"]},
    "camembert": _MEAN,
    "electra": _CLS,
    "distilbert": {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False},
    "modernbert": _CLS,
    "mpnet": _MEAN,
    "qwen3": _LAST,
    "qwen2": _LAST,
    "llama": _LAST,
    "mistral": _LAST,
    "gemma": _MEAN,
}
EMBEDDING_MODELS = tuple(_CONFIGS)
_PROMPTS: dict[str, dict[str, Any]] = {
    "bge": {"prompts": {"query": "query : ", "document": ""}, "default_prompt_name": None},
    "e5": {
        "prompts": {"query": "query : ", "passage": "passage : "},
        "default_prompt_name": "passage",
    },
    "qwen3": {"prompts": {"query": "instruct retrieve documents query : "}},
}
_DENSE = {"gemma": ((48, 96, False, "linear.Identity"), (96, 40, True, "activation.Tanh"))}
_UNNORMALIZED = {"roberta"}


@cache
def tiny_embedding(name: str, **options: Any) -> Path:
    """The directory of a tiny embedding model, made once and shared; treat it as read-only.

    `options` go into its config.json.
    """
    directory = _embedding(name)
    if options:
        config = json.loads((directory / "config.json").read_text())
        _json(directory / "config.json", config | options)
    return directory


@cache
def sized_embedding(name: str, **sizes: Any) -> Path:
    """One of `tiny_embedding`'s families in other sizes: fields of its configuration.

    Not of those with Dense layers.
    """
    return _embedding(name, **sizes)


def _embedding(name: str, **sizes: Any) -> Path:
    config = _CONFIGS[name](**sizes)
    directory = _root() / f"{name}-{len(list(_root().iterdir()))}"
    save_model(AutoModel.from_config, config, directory, name)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    for number, (inside, outside, bias, activation) in enumerate(_DENSE.get(name, ()), 2):
        modules.append((f"{number}_Dense", "Dense"))
        _save_dense(
            directory / f"{number}_Dense", inside, outside, bias, f"torch.nn.modules.{activation}"
        )
    if name not in _UNNORMALIZED:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    _json(
        directory / "modules.json",
        [
            {
                "idx": index,
                "name": str(index),
                "path": path,
                "type": f"sentence_transformers.models.{kind}",
            }
            for index, (path, kind) in enumerate(modules)
        ],
    )
    _json(
        directory / "1_Pooling" / "config.json",
        {"word_embedding_dimension": config.hidden_size, **_POOLING[name]},
    )
    _json(
        directory / "sentence_bert_config.json",
        {"max_seq_length": MAX_LENGTH, "do_lower_case": False},
    )
    _json(directory / "config_sentence_transformers.json", _PROMPTS.get(name, {}))
    return directory


@cache
def tiny_scoring(name: str, labels: int = 1, **sizes: Any) -> Path:
    """The directory of a tiny cross-encoder."""
    directory = _root() / f"score-{name}-{len(list(_root().iterdir()))}"
    config = _CONFIGS[name](**sizes)
    config.num_labels = labels
    save_model(AutoModelForSequenceClassification.from_config, config, directory, name)
    return directory


def tiny_config(name: str, **sizes: Any) -> Any:
    """The configuration of one of the families."""
    return _CONFIGS[name](**sizes)


def save_model(make: Any, config: Any, directory: Path, name: str) -> None:
    """Save a model that `make` makes of `config`, with lively weights, and a tokenizer."""
    state = torch.random.get_rng_state()
    torch.manual_seed(20261121)
    try:
        model = make(config)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.ndim < 2:
                    offset = 1.0 if key.endswith("weight") and name != "gemma" else 0.0
                    parameter.copy_(offset + 0.2 * torch.randn_like(parameter))
                else:
                    parameter.copy_(
                        torch.randn_like(parameter) * (1.5 / parameter.shape[-1] ** 0.5)
                    )
    finally:
        torch.random.set_rng_state(state)
    model.save_pretrained(directory)
    _tokenizer(name).save_pretrained(directory)


def _save_dense(directory: Path, inside: int, outside: int, bias: bool, activation: str) -> None:
    generator = torch.Generator().manual_seed(inside)
    weights = {"linear.weight": torch.randn(outside, inside, generator=generator) / inside**0.5}
    if bias:
        weights["linear.bias"] = torch.randn(outside, generator=generator)
    directory.mkdir(parents=True)
    save_file(weights, directory / "model.safetensors")
    config = {
        "in_features": inside,
        "out_features": outside,
        "bias": bias,
        "activation_function": activation,
    }
    _json(directory / "config.json", config)


def _json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


@cache
def _tokenizer(name: str) -> PreTrainedTokenizerFast:
    special = list(_SPECIAL)
    if name == "mpnet":  # its code knows padding by the id 1
        special[:2] = special[1::-1]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate([*special, *WORDS])}, "[UNK]")
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", special.index("[CLS]")), ("[SEP]", 2)]
    if name in ("qwen3", "qwen2", "llama", "mistral", "gemma"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A [SEP]", special_tokens=ends
        )
    elif name in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B [SEP]", special_tokens=ends
        )
    else:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        model_max_length=MAX_LENGTH,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"]
        if name in ("bert", "bge", "e5", "electra")
        else ["input_ids", "attention_mask"],
    )


@cache
def _root() -> Path:
    return scratch("embedding-models")
