"""Tiny model directories with random weights, made once a session.

Real configurations, tokenizers and chat templates.

    tiny("llama")                     a cached directory, made at first use, removed when the process ends
    tiny("qwen3", dtype="bfloat16")   another
    tiny_llama(directory)             the same content in a directory of one's own
    make("qwen2", directory, num_hidden_layers=3)

What the families are is in `tests.model_configs`. Weights are drawn wide enough that greedy output
does not fall into repeating one token.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from tests.model_configs import EOS_ID, FAMILIES, VOCAB_SIZE, config_of
from tests.scratch import scratch

END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
"""The tokens 0 to 2. A generation config names the last as the end of the output."""

THINK = ("<think>", "</think>")
"""Tags of reasoning that `add_thinking` adds."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = (
    "the harbour town counts its lanterns every night and writes the number in a book",
    "Hello world, what is the capital of the island? It is the town on the hill.",
    'user system assistant tool {"name": "value", "count": 42}',
    "naïve café, straße, привет, 東京, 🙂",
)


def make(
    family: str,
    directory: Path,
    *,
    dtype: str = "float32",
    shard_size: str = "50GB",
    **options: Any,
) -> Path:
    """Write a model of `family` into `directory`.

    Weights, configurations, tokenizer, chat template.

    Args:
        family: one of `FAMILIES`.
        directory: made if it does not exist.
        dtype: of the checkpoint.
        shard_size: largest weight file, for sharded checkpoints ("40KB").
        options: configuration fields that differ from the family's.
    """
    config = config_of(family, **options)
    state = torch.random.get_rng_state()
    torch.manual_seed(20261121)
    try:
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
                elif name.endswith("A_log"):
                    # States last for some fifty positions.
                    parameter.copy_(torch.randn_like(parameter) - 4)
                elif name.endswith("bias"):
                    parameter.copy_(0.3 * torch.randn_like(parameter))
                elif name.endswith("embed_tokens.weight"):
                    # Rows of scaled embeddings are as large as those of others.
                    scale = float(getattr(model.get_input_embeddings(), "embed_scale", 1.0))
                    parameter.copy_(torch.randn_like(parameter) * (0.5 / scale))
                else:
                    parameter.copy_(
                        torch.randn_like(parameter) * (1.5 / parameter.shape[-1] ** 0.5)
                    )
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(0.3 * torch.randn_like(buffer))
        model.tie_weights()
    finally:
        torch.random.set_rng_state(state)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=0)
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=shard_size)
    tokenizer().save_pretrained(directory)
    return directory


def tiny_llama(directory: Path) -> Path:
    """A Llama: untied head, heads in groups of three."""
    return make("llama", directory)


def tiny_qwen3(directory: Path) -> Path:
    """A Qwen3: query and key norms, tied head, head size 16 beside hidden size 48."""
    return make("qwen3", directory)


def tiny_qwen2(directory: Path) -> Path:
    """A Qwen2: biased projections, tied head, no grouping of heads."""
    return make("qwen2", directory)


def tiny_mistral(directory: Path) -> Path:
    """A Mistral: sliding window of 24 positions."""
    return make("mistral", directory)


__all__ = [
    "CHAT_TEMPLATE",
    "END",
    "EOS_ID",
    "FAMILIES",
    "TURN",
    "TURN_END",
    "VOCAB_SIZE",
    "make",
    "tiny",
]


@cache
def tiny(family: str, dtype: str = "float32") -> Path:
    """The directory of a tiny model of `family`, made once and shared; treat it as read-only."""
    return make(family, models_root() / f"{family}-{dtype}", dtype=dtype)


def add_thinking(directory: Path) -> Path:
    """Give the model in `directory` the tags `<think>` and `</think>`, each a token, and a template that knows them."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in THINK])
    told = "{# <think></think> #}{% if thinks %}{{ '<think>\n' }}{% endif %}"
    tokenizer.chat_template = CHAT_TEMPLATE + told
    tokenizer.save_pretrained(directory)
    return directory


@cache
def models_root() -> Path:
    """Where models are kept until the process ends."""
    return scratch("models")


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of every tiny model."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 40,
        special_tokens=[AddedToken(text, special=True) for text in (END, TURN, TURN_END)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=TURN_END,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )
