"""Small tokenizer directories of each kind that models come with, trained once a session."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from inlay.render import Renderer
from tests.scratch import scratch

CORPUS = (
    "the harbour town counts its lanterns every night and writes the number in a book",
    "Hello world, what is the capital of the island? It's the town on the hill; we'll see 1234567 lamps.",
    'user system assistant tool {"name": "value", "count": 42, "list": [1, 2]}\n\n  indented\tcode()',
    "naïve café, straße, привет мир, 東京タワー, ελληνικά",
)

QWEN_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n' }}{%- endif %}
        {{- message.content }}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

LLAMA_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
    {% if message['role'] not in ['user', 'assistant', 'system'] %}
        {{ raise_exception('Only user, assistant and system roles are supported, not ' + message['role']) }}
    {% endif %}
    {{ '[' + message['role'] | upper + '] ' + message['content'] | trim + ' ' }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '[ASSISTANT]' }}{% endif %}
"""

PARTS_TEMPLATE = """\
{% macro body(content) %}{% if content is string %}{{ content }}{% else %}{% for item in content %}\
{% if item.type == 'text' %}{{ item.text | trim }}{% endif %}{% endfor %}{% endif %}{% endmacro %}\
{% for m in messages %}<{{ m.role }}>{{ body(m.content) }}</{{ m.role }}>{% endfor %}\
"""


def byte_level() -> Tokenizer:
    """As Qwen's and Llama-3's: byte-level BPE, its pieces cut by a pattern."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    pattern = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=[
                AddedToken(text, special=True)
                for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
            ],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens(
        [AddedToken("<think>", special=False), AddedToken("</think>", special=False)]
    )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama-2's and Mistral's.

    BPE on characters, spaces as U+2581, bytes where characters are unknown, a bos token.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.train_from_iterator(
        [line for line in CORPUS if line.isascii()],
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
            show_progress=False,
        ),
    )
    # The trainer calls the byte tokens special; models' vocabularies do not.
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [
        token for token in data["added_tokens"] if not token["content"].startswith("<0x")
    ]
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5's: Unigram with a Metaspace decoder."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        ),
    )
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=250, special_tokens=["[UNK]", "[CLS]"], show_progress=False
        ),
    )
    return tokenizer


def sparse() -> Tokenizer:
    """Few tokens, one of them without any text, with the decoder of Llama-2.

    What arbitrary ids stumble over.
    """
    tokens = [
        "",
        "▁",
        "▁▁",
        "▁a",
        "b",
        "\ufffd",
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in (0x41, 0xE2, 0x82, 0xAC)),
    ]
    tokenizer = Tokenizer(
        models.WordLevel({token: id_ for id_, token in enumerate(tokens)}, unk_token="<unk>")
    )
    tokenizer.decoder = byte_fallback().decoder
    return tokenizer


def byte_level_after_replace() -> Tokenizer:
    """Byte-level behind another step, so that tokens have no bytes of their own that anyone could tell."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("</w>", ""), decoders.ByteLevel()])
    return tokenizer


KINDS = {
    "sparse": sparse,
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "word_piece": word_piece,
}


def save(tokenizer: Tokenizer, directory: Path, **config: Any) -> Path:
    """Write what transformers writes for `tokenizer`."""
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **config).save_pretrained(directory)
    return directory


@cache
def qwen_like() -> Path:
    """A byte-level directory with a template for tools and reasoning."""
    return save(
        byte_level(),
        _root() / "qwen",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=QWEN_TEMPLATE,
    )


@cache
def llama_like() -> Path:
    """A byte-fallback directory with a bos token and a template that trims and shouts."""
    return save(
        byte_fallback(),
        _root() / "llama",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=LLAMA_TEMPLATE,
    )


@cache
def renderer(kind: str) -> Renderer:
    """A renderer without a template, of one of `KINDS` or of "byte_level_after_replace"."""
    directory = _root() / kind
    directory.mkdir()
    make = KINDS.get(kind, byte_level_after_replace)
    make().save(str(directory / "tokenizer.json"))
    return Renderer.load(directory)


@cache
def _root() -> Path:
    return scratch("tokenizers")
