"""A tiny DeepSeek-R1 with random weights, laid out as the real one is published.

    published()                          R1's own config.json
    write(directory)                     fp8 weights in blocks, a multi-token prediction layer, R1's tokens and template
    write_plain(directory, of)           the same model in float32, dequantised by the formula

Its weights are random, but for the embeddings and the head of the tokens of `SCRIPT`: behind the
end of a generation prompt the model thinks, answers, calls a tool and ends, so that what reads an
output has something to read.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.models import make, models_root

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
EOS_ID = 1

_PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.3",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}

_TINY: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "hidden_size": 192,
    "intermediate_size": 256,
    "max_position_embeddings": 640,
    "moe_intermediate_size": 128,
    "n_group": 4,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "rope_scaling": {
        **_PUBLISHED["rope_scaling"],
        "factor": 10,
        "original_max_position_embeddings": 64,
    },
    "topk_group": 2,
    "v_head_dim": 32,
    "vocab_size": 512,
}
"""Where the tiny one differs.

Its latent is R1's own (512 and 64 elements): 576 rows are four blocks of 128 and a half.
"""

THOUGHTS = ("They ask for boats,", " and I can look", " for them.")
ANSWER = "\n\nI look."
ARGUMENTS = ('{"place": "harbour", ', '"days": 2}')
SCRIPT = (
    *THOUGHTS, "</think>", ANSWER, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>",
    "boats\n```json\n", *ARGUMENTS, "\n```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", EOS,
)  # fmt: skip
"""What the model says behind a generation prompt: a token each, and none twice."""

_TOKENS = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>",
           "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>")  # fmt: skip

CHAT_TEMPLATE = """\
{%- set said = namespace(system='', first=true, tool=false) %}
{%- for message in messages if message['role'] == 'system' %}
    {%- set said.system = said.system + message['content'] %}
{%- endfor %}
{{- bos_token + said.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set said.tool = false %}
        {{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['tool_calls'] %}
        {{- '<｜Assistant｜>' + (message['content'] or '').split('</think>')[-1] }}
        {%- for call in message['tool_calls'] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
            {{- '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] + '\\n```json\\n' }}
            {{- call['function']['arguments'] if call['function']['arguments'] is string else call['function']['arguments']|tojson }}
            {{- '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<｜tool▁outputs▁end｜>' if said.tool else '<｜Assistant｜>' }}
        {%- set said.tool = false %}
        {{- message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'tool' %}
        {{- ('\\n' if said.tool else '<｜tool▁outputs▁begin｜>') + '<｜tool▁output▁begin｜>' }}
        {{- message['content'] + '<｜tool▁output▁end｜>' }}
        {%- set said.tool = true %}
    {%- endif %}
{%- endfor %}
{{- '<｜tool▁outputs▁end｜>' if said.tool }}
{{- '<｜Assistant｜><think>\\n' if add_generation_prompt and not said.tool }}"""
"""Of the shape of R1's.

Reasoning is dropped from earlier turns and opened for the next, content is joined as text.
"""

_CORPUS = (
    "the harbour town counts its boats every night and writes the number in a book",
    "Hello world, which boats lie in the harbour? They ask for boats",
    '{"name": "value", "place": "hill", "days": 42}\n\n',
)


def published() -> dict[str, Any]:
    """The `config.json` of DeepSeek-R1 as it is published, field by field."""
    return dict(_PUBLISHED)


def recipes() -> list[list[str]]:
    """The words of every `inlay` command that `docs/deepseek.md` shows, without the first."""
    page = (Path(__file__).resolve().parent.parent / "docs" / "deepseek.md").read_text(
        encoding="utf-8"
    )
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


def write(directory: Path, *, next_token_layer: bool = True, **changes: Any) -> Path:
    """A tiny R1 as the real one is laid out.

    Linear weights in fp8 with a scale for each block of 128 x 128.

    Args:
        directory: made if it does not exist.
        next_token_layer: whether the layer that predicts further tokens is in the files, as it is
            in R1's.
        changes: fields of the configuration that differ from the tiny one's.
    """
    config = {**_PUBLISHED, **_TINY, **changes}
    tokenizer = _tokenizer()
    tensors = _weights(directory, config)
    _script(tensors, tokenizer)
    if next_token_layer:
        tensors |= _next_token_layer(tensors, config)
    (directory / "model.safetensors").unlink()
    stored = dict(_stored(tensors))
    save_file(stored, directory / "model-00001-of-000001.safetensors")
    names = dict.fromkeys(stored, "model-00001-of-000001.safetensors")
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": names})
    )
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.95}
    (directory / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 0, "eos_token_id": EOS_ID, **sampling})
    )
    tokenizer.save_pretrained(directory)
    return directory


def write_plain(directory: Path, of: Path) -> Path:
    """The model of `of` for plain transformers.

    Float32 weights, the product of each element and its block's scale.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stored = load_file(next(of.glob("*.safetensors")))
    config = json.loads((of / "config.json").read_text())
    tensors = {
        name: by_formula(tensor, stored[f"{name}_scale_inv"])
        if f"{name}_scale_inv" in stored
        else tensor.float()
        for name, tensor in stored.items()
        if not name.endswith("_scale_inv")
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        name: value
        for name, value in config.items()
        if name not in ("quantization_config", "auto_map")
    }
    (directory / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": EOS_ID, "pad_token_id": 2})
    )
    _tokenizer().save_pretrained(directory)
    return directory


@cache
def tiny_r1() -> Path:
    """The directory of a tiny R1, made once and shared; treat it as read-only."""
    return write(models_root() / "r1")


@cache
def plain_r1() -> Path:
    """The same model for plain transformers."""
    return write_plain(models_root() / "r1-plain", tiny_r1())


def by_formula(weight: Tensor, scale: Tensor, block: int = 128) -> Tensor:
    """What is stored, element by element, in float32.

    `weight[i, j] * scale[i // block, j // block]`.
    """
    rows = torch.arange(weight.shape[0])[:, None] // block
    columns = torch.arange(weight.shape[1])[None, :] // block
    return weight.float() * scale[rows, columns]


def _in_blocks(weight: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """`weight` in float8_e4m3fn, each block scaled so that its largest value is the largest there is; and the scales."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    rows, columns = weight.shape
    scale = torch.zeros(-(-rows // block), -(-columns // block))
    stored = torch.zeros_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scale[i, j] = weight[at].abs().max() / largest
            stored[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
    return stored, scale


def _stored(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """`tensors` as R1's files have them.

    Projections in fp8, the routers' corrections in float32, the others in bfloat16.
    """
    for name, tensor in tensors.items():
        if name.endswith(("_proj.weight", ".kv_a_proj_with_mqa.weight")):
            weight, scale = _in_blocks(tensor)
            yield name, weight
            yield f"{name}_scale_inv", scale
        elif name.endswith("e_score_correction_bias"):
            yield name, tensor
        else:
            yield name, tensor.to(torch.bfloat16)


def _weights(directory: Path, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Random weights in float32, under the names R1's have."""
    rope = config["rope_scaling"]
    fields = {
        name: config[name]
        for name in (
            *_TINY,
            "kv_lora_rank",
            "qk_rope_head_dim",
            "n_shared_experts",
            "routed_scaling_factor",
        )
        if name != "rope_scaling"
    }
    own = {"rope_type": "yarn", "rope_theta": config["rope_theta"], **rope}
    make("deepseek_v3", directory, **fields, rope_parameters=own, eos_token_id=EOS_ID)
    tensors: dict[str, Tensor] = load_file(directory / "model.safetensors")
    return tensors


def _script(tensors: dict[str, Tensor], tokenizer: PreTrainedTokenizerFast) -> None:
    """Make each token of `SCRIPT` the one that follows the token before it."""
    ids = tokenizer.convert_tokens_to_ids(["Ċ", *SCRIPT])
    assert len({*ids, tokenizer.unk_token_id}) == len(ids) + 1, "a token is missing, or there twice"
    embeddings, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    # So large that what the layers add to it does not hide it.
    embeddings[ids] *= 40
    for before, after in pairwise(ids):
        shown = embeddings[before] * tensors["model.norm.weight"]
        head[after] += shown / shown.norm()


def _next_token_layer(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """R1's layer behind the last one, which predicts the token after the next.

    A layer and what joins it to the others.
    """
    last, place = config["num_hidden_layers"] - 1, f"model.layers.{config['num_hidden_layers']}."
    layer = {
        place + name.removeprefix(f"model.layers.{last}."): tensor.flip(0).contiguous()
        for name, tensor in tensors.items()
        if name.startswith(f"model.layers.{last}.")
    }
    hidden = config["hidden_size"]
    own = {
        "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "shared_head.head.weight": tensors["lm_head.weight"].clone(),
        "shared_head.norm.weight": torch.ones(hidden),
        "enorm.weight": torch.ones(hidden),
        "hnorm.weight": torch.ones(hidden),
        "eh_proj.weight": torch.eye(hidden, 2 * hidden),
    }
    return layer | {place + name: tensor for name, tensor in own.items()}


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=440,
        special_tokens=[
            AddedToken(text, special=True, normalized=False) for text in (BOS, EOS, PAD)
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    # As in R1's, these are tokens of their own that are shown: only those above are special.
    tokenizer.add_tokens(
        [
            AddedToken(text, special=False, normalized=False)
            for text in (*_TOKENS, *SCRIPT)
            if text != EOS
        ]
    )
    # R1's tokenizer begins what it encodes; its template does that itself.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=640,
    )
