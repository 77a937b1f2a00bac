"""A GGUF file answers as the directory that it was made from, or says why it cannot."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from inlay.base.errors import InvalidRequestError
from inlay.client import PromptEmbedder
from inlay.engine.model_files import default_sampling, eos_token_ids, generation_config
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.weights.checkpoint import parsed_config
from inlay.engine.torch.weights.gguf import gguf_weights
from inlay.engine.weights import weights_id
from inlay.render import Renderer
from inlay.tensors import gguf_model
from inlay.tensors.checkpoint import checkpoint_of, config_of, json_of, stored_tensors
from inlay.tensors.gguf_model import block_runs, read_blocks, read_values
from inlay.tensors.gguf_tokenizer import GgufTokenizer
from inlay.tensors.hub import local_directory
from inlay.tensors.table import EmbeddingTable
from tests.commands import run
from tests.gguf_models import gguf_of, tensors_of
from tests.models import VOCAB_SIZE, make, tiny
from tests.tensors.gguf_files import gguf_bytes, stored

FAMILIES = (
    "llama", "llama3", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "qwen2_moe",
    "gemma3_text",
)  # fmt: skip
TEXTS = ("the harbour town", "naïve café <|im_end|>\n\n  two", "{'a': 42}", "東京 🙂")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models whose configurations GGUF can say."""
    gemma = tmp_path_factory.mktemp("gemma")
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    options: dict[str, Any] = {
        "num_hidden_layers": 6,
        "query_pre_attn_scalar": 24,
        "layer_types": kinds,
    }
    sparse = tmp_path_factory.mktemp("qwen2_moe")
    return {family: tiny(family) for family in FAMILIES[:-2]} | {
        "gemma3_text": make("gemma3_text", gemma, **options),
        # No file says of a layer that it has no experts.
        "qwen2_moe": make("qwen2_moe", sparse, mlp_only_layers=[]),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_directory(
    directories: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """Also permuted heads, shifted norms and turned experts; a head where the model has one."""
    file = gguf_of(directories[family], tmp_path / "m.gguf")
    wanted = load_file(directories[family] / "model.safetensors")
    weights = gguf_weights(file, torch.float32, str)
    found = {name: weight[...].numpy() for name, weight in weights.items()}
    assert found.keys() == wanted.keys()
    for name, values in found.items():
        # One is added to a norm of Gemma, which rounds, and taken away.
        within = 1e-6 if family == "gemma3_text" and name.endswith("norm.weight") else 0
        assert np.abs(values - wanted[name]).max() <= within, name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_computes_the_same(
    directories: dict[str, Path], tmp_path: Path, family: str
) -> None:
    file = gguf_of(directories[family], tmp_path / "m.gguf")
    found, wanted = (parsed_config(path).to_dict() for path in (file, directories[family]))
    says_nothing = {"_name_or_path", "transformers_version", "dtype", "initializer_range"}
    says_nothing |= {"eos_token_id", "bos_token_id", "pad_token_id", "use_cache"}
    differing = {
        key: (found.get(key), wanted.get(key))
        for key in found.keys() | wanted.keys()
        if found.get(key) != wanted.get(key) and key not in says_nothing
    }
    if wanted.get("head_dim") is None and "head_dim" in differing:
        del differing["head_dim"]
        assert found.get("head_dim") in (
            None,
            wanted["hidden_size"] // wanted["num_attention_heads"],
        )
    assert differing == {}


def test_blocks_are_dequantised_in_the_order_of_the_model(tmp_path: Path) -> None:
    """Rows are permuted, whole blocks each."""
    directory = tiny("llama2")
    file = gguf_of(directory, tmp_path / "m.gguf", "Q8_0")
    wanted = load_file(directory / "model.safetensors")
    for tensor in stored_tensors(file):
        near = np.abs(wanted[tensor.name]).max() / 100
        assert np.abs(read_values(tensor) - wanted[tensor.name]).max() < near, tensor.name
    assert config_of(file)["dtype"] == "bfloat16"


def test_blocks_come_some_rows_at_a_time_from_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where heads are permuted, which takes all of them; a file that shrinks is noticed."""
    monkeypatch.setattr(gguf_model, "_RUN", 1)
    file = gguf_of(tiny("llama2"), tmp_path / "m.gguf", "Q8_0")
    several = 0
    for tensor in stored_tensors(file):
        if len(tensor.shape) < 2:
            continue
        found = [(run.copy(), run) for run in block_runs(tensor, 16)]
        assert np.array_equal(np.concatenate([run for run, _ in found]), read_blocks(tensor))
        several += len(found) > 1
        if not tensor.paired_heads:
            assert all(len(run) == 16 for run, _ in found[:-1])
            assert all(np.shares_memory(found[0][1], memory) for _, memory in found)
    assert several > 2
    last = max(stored_tensors(file), key=lambda tensor: tensor.offset * (len(tensor.shape) == 2))
    with file.open("r+b") as stream:
        stream.truncate(last.offset + 10)
    with pytest.raises(InvalidRequestError, match="and was longer before"):
        list(block_runs(last, 16))


def test_ids_template_and_ends_are_those_of_the_directory(tmp_path: Path) -> None:
    directory = tiny("qwen3")
    file = gguf_of(directory, tmp_path / "m.gguf")
    found, wanted = Renderer.load(file), Renderer.load(directory)
    for text in TEXTS:
        assert found.encode(text) == wanted.encode(text)
    message = [{"role": "user", "content": "Hello"}]
    assert found.chat(message).token_ids() == wanted.chat(message).token_ids()
    # <|im_end|>, and <|endoftext|> by its name.
    assert eos_token_ids(json_of(file, "generation_config.json"), None) == (2, 0)


def test_sampling_defaults_are_those_of_the_file(tmp_path: Path) -> None:
    settings = EngineSettings.of(model="m")
    plain = gguf_of(tiny("llama"), tmp_path / "a.gguf")
    keys: dict[str, Any] = {"general__sampling__temp": 0.5, "general__sampling__top_k": 20}
    asked = gguf_of(tiny("llama"), tmp_path / "b.gguf", **keys)
    assert default_sampling(generation_config(settings.model, plain)) == {}
    found = default_sampling(generation_config(settings.model, asked))
    assert found == {"temperature": 0.5, "top_k": 20}


def test_a_large_tokenizer_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_model, "_LARGE", 0)
    file = gguf_of(tiny("llama"), tmp_path / "m.gguf")
    made = checkpoint_of(file).file("tokenizer.json")
    (kept,) = (tmp_path / "cache" / "inlay" / "tokenizers").iterdir()
    assert kept.read_bytes() == made
    kept.write_bytes(b"{}")
    assert checkpoint_of(file).file("tokenizer.json") == b"{}"
    other = gguf_of(tiny("llama"), tmp_path / "n.gguf", tokenizer__ggml__pre="llama-bpe")
    assert checkpoint_of(other).file("tokenizer.json") not in (made, b"{}")


def test_a_user_without_a_home_makes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.setattr(gguf_model, "_LARGE", 0)
    file = gguf_of(tiny("llama"), tmp_path / "m.gguf")
    assert checkpoint_of(file).file("tokenizer.json") == checkpoint_of(file).file("tokenizer.json")


def test_normalisers_and_first_tokens_are_those_of_the_split(tmp_path: Path) -> None:
    directory = tiny("qwen3")
    bos: dict[str, Any] = {"tokenizer__ggml__bos_token_id": 1}
    qwen = gguf_of(directory, tmp_path / "q.gguf", tokenizer__ggml__pre="qwen2", **bos)
    llama = gguf_of(directory, tmp_path / "l.gguf", tokenizer__ggml__pre="llama-bpe", **bos)
    assert Renderer.load(qwen).encode("cafe\u0301") == Renderer.load(qwen).encode("caf\u00e9")
    assert Renderer.load(llama).encode("a")[0] == 1
    assert Renderer.load(qwen).encode("a")[0] != 1
    never = gguf_of(
        directory, tmp_path / "n.gguf", tokenizer__ggml__pre="llama-bpe",
        tokenizer__ggml__add_bos_token=False, **bos,
    )  # fmt: skip
    assert Renderer.load(never).encode("a")[0] != 1


def test_words_of_gpt_4o_are_split_where_its_case_changes(tmp_path: Path) -> None:
    """As `o200k_base` of tiktoken: contractions end a word, and three digits stand together."""
    directory = tiny("gpt_oss")
    file = gguf_of(directory, tmp_path / "m.gguf", tokenizer__ggml__pre="gpt-4o")
    form = json.loads(checkpoint_of(file).file("tokenizer.json") or b"")
    split = Tokenizer.from_str(json.dumps(form)).pre_tokenizer
    found = [text for text, _ in split.pre_tokenize_str("HTMLPage don't 12345 a/b.//\n x")]
    assert found == ["HTMLPage", "Ġdon't", "Ġ", "123", "45", "Ġa", "/b", ".//Ċ", "Ġx"]
    assert form["model"]["ignore_merges"]


def test_the_end_of_a_channel_ends_no_turn(tmp_path: Path) -> None:
    file = gguf_of(tiny("gpt_oss"), tmp_path / "m.gguf")
    metadata = checkpoint_of(file).gguf.metadata  # type: ignore[attr-defined]
    ends = {}
    for names in (["<|end|>"], ["<|end|>", "<|return|>", "<|call|>"]):
        tokens, types = (
            [*metadata["tokenizer.ggml.tokens"]],
            [*metadata["tokenizer.ggml.token_type"]],
        )
        tokens[-len(names) :], types[-len(names) :] = names, [3] * len(names)
        changes: dict[str, Any] = {"tokens": tokens, "token_type": types}
        keys = {f"tokenizer__ggml__{key}": of for key, of in changes.items()}
        other = gguf_of(tiny("gpt_oss"), tmp_path / f"{len(names)}.gguf", **keys)
        found = json.loads(checkpoint_of(other).file("generation_config.json") or b"")
        ends[len(names)] = {tokens[index] for index in found["eos_token_id"]} & {*names}
    assert ends == {1: {"<|end|>"}, 3: {"<|return|>", "<|call|>"}}


def test_a_vocabulary_of_sentencepiece_is_read_from_its_scores(tmp_path: Path) -> None:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "a", "b", "ab", "\u2581ab", "  "]
    types = [2, 3, 3, *[6] * 256, *[1] * 5, 4]
    scores = [0.0] * 259 + [-5.0, -6.0, -7.0, -1.0, -2.0, 0.0]
    spare = VOCAB_SIZE - len(words)
    words, types = words + [f"[PAD{index}]" for index in range(spare)], types + [5] * spare
    scores += [-1000.0] * spare
    file = gguf_of(
        tiny("llama"), tmp_path / "m.gguf", tokenizer__ggml__model="llama", tokenizer__ggml__pre=None,
        tokenizer__ggml__merges=None, tokenizer__ggml__tokens=words,
        tokenizer__ggml__token_type=types, tokenizer__ggml__scores=scores,
        tokenizer__ggml__bos_token_id=1,
    )  # fmt: skip
    renderer = Renderer.load(file)
    ab = words.index("\u2581ab")
    assert renderer.encode("ab") == (1, ab)
    assert renderer.encode("ab é", add_special_tokens=False) == (ab, 259, 3 + 0xC3, 3 + 0xA9)
    assert renderer.encode("ab  b", add_special_tokens=False) == (ab, words.index("  "), 261)


@pytest.mark.parametrize("more", [[], [" b", "a b"], ["#version", "#versiona"]])
def test_merges_are_texts_unless_one_would_be_read_otherwise(more: list[str]) -> None:
    words = ["a", "b", "ab", *more]
    metadata = {"model": "llama", "tokens": words, "scores": [-float(len(word)) for word in words]}
    said = GgufTokenizer("m.gguf", {f"tokenizer.ggml.{key}": of for key, of in metadata.items()})
    form = said.form()
    read = json.loads(Tokenizer.from_str(json.dumps(form)).to_str())["model"]["merges"]
    pairs = [["a", "b"], *([["a", " b"]] if " b" in more else [])]
    pairs += [["#version", "a"]] if "#version" in more else []
    assert sorted(read) == sorted(pairs)
    assert form["model"]["merges"] == (["a b"] if not more else [(*pair,) for pair in read])


def test_rows_are_the_same_without_torch_and_without_the_package_gguf(tmp_path: Path) -> None:
    file = gguf_of(tiny("llama2"), tmp_path / "m.gguf", "Q8_0")
    table = EmbeddingTable.open(file)
    (stored_table,) = (t for t in stored_tensors(file) if t.name.endswith("embed_tokens.weight"))
    values = read_values(stored_table)
    assert (table.rows([3, 1, 3], "float32") == values[[3, 1, 3]]).all()
    assert table.abs_max() == np.abs(values).max()
    assert table.rows([]).shape == (0, values.shape[1])
    code = (
        "import sys\nfrom inlay.client import PromptEmbedder\n"
        f"made = PromptEmbedder.from_pretrained({str(file)!r}).embed('the harbour')\n"
        "assert not {'torch', 'gguf', 'transformers'} & sys.modules.keys()\n"
        "print(made.rows.tobytes().hex())"
    )
    there = run(sys.executable, "-c", code)
    here = PromptEmbedder.from_pretrained(file).embed("the harbour")
    assert there.strip() == here.rows.tobytes().hex()
    assert here.rows.dtype == "bfloat16"


def test_ids_tell_files_and_tables_apart(tmp_path: Path) -> None:
    directory = tiny("llama2")
    whole, blocks = (
        gguf_of(directory, tmp_path / f"{kind}.gguf", kind) for kind in ("F32", "Q8_0")
    )
    assert EmbeddingTable.open(whole).id == EmbeddingTable.open(directory).id
    assert EmbeddingTable.open(blocks).id != EmbeddingTable.open(directory).id
    assert len({weights_id(path) for path in (directory, whole, blocks)}) == 3


def test_a_directory_stands_for_the_only_file_in_it(tmp_path: Path) -> None:
    file = gguf_of(tiny("llama"), tmp_path / "m.gguf")
    (tmp_path / "mmproj-m.gguf").write_bytes(b"")
    assert local_directory(tmp_path) == file
    gguf_of(tiny("llama"), tmp_path / "n.gguf")
    with pytest.raises(InvalidRequestError, match=r"2 GGUF models \(m.gguf, n.gguf\): name one"):
        local_directory(tmp_path)
    assert local_directory(tiny("llama")) == tiny("llama")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"general__architecture": "rwkv"},
            "architecture 'rwkv'; of GGUF files those of llama, qw",
        ),
        ({"llama__nextn_predict_layers": 1}, "has 'nextn_predict_layers', which this version does"),
        ({"llama__expert_count": 8}, "it does not say llama.expert_used_count"),
        ({"llama__expert_count": 8, "llama__expert_used_count": 9}, "positions choose 9 of 8 exp"),
        (
            {"llama__expert_count": 4096, "llama__expert_used_count": 2},
            "of which there may be 1024",
        ),
        ({"llama__expert_count": 8, "llama__expert_used_count": 2}, "it has 'blk.0.ffn_down.wei"),
        ({"llama__logit_scale": 0.5}, "'logit_scale', which this version does not know for llama"),
        ({"llama__block_count": None}, "it does not say llama.block_count"),
        ({"llama__block_count": 1}, "it has 'blk.1.attn_k.weight'"),
        ({"llama__block_count": 4_000_000_000}, "tensors for 4000000000 layers"),
        ({"llama__block_count": "two"}, "llama.block_count is 'two', not int"),
        ({"llama__embedding_length": 1 << 31}, "has shape"),
        ({"llama__attention__head_count_kv": [1, 2]}, "differs from layer to layer"),
        ({"llama__rope__scaling__type": "longrope"}, "read are none, linear and yarn"),
        ({"llama__rope__freq_base": float("nan")}, "llama.rope.freq_base is nan"),
        ({"llama__rope__dimension_count": 4}, "its heads are of 8, and rope.dimension_count is 4"),
        ({"tokenizer__ggml__pre": "mystery"}, "in the way 'mystery', and those known are gpt-2"),
        ({"tokenizer__ggml__model": "rwkv"}, "of kind 'rwkv'; read are gpt2 and llama"),
        ({"tokenizer__ggml__tokens": ["a"]}, "1 tokens and"),
        ({"tokenizer__ggml__eos_token_id": 1 << 30}, "eos_token_id is 1073741824, of"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    file = gguf_of(tiny("llama"), tmp_path / "m.gguf", **changes)
    with pytest.raises(InvalidRequestError) as caught:
        checkpoint_of(file)
    assert said in caught.value.message
    assert str(file) in caught.value.message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer__ggml__merges": ["zz zz"]}, "its merge 'zz zz' is not of its tokens"),
        ({"tokenizer__ggml__merges": None}, "it has no tokenizer.ggml.merges"),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    file = gguf_of(tiny("llama"), tmp_path / "m.gguf", **changes)
    with pytest.raises(InvalidRequestError) as caught:
        Renderer.load(file)
    assert said in caught.value.message


def _with_tensors(directory: Path, file: Path, **changes: Any) -> Path:
    """A file of the model with some of its tensors replaced, or left out."""
    header = gguf_of(directory, file)
    metadata = checkpoint_of(header).gguf.metadata  # type: ignore[attr-defined]
    tensors = tensors_of(directory) | {key.replace("__", "."): of for key, of in changes.items()}
    file.write_bytes(
        gguf_bytes(metadata, {name: of for name, of in tensors.items() if of is not None})
    )
    return file


def test_tensors_that_are_missing_or_of_another_model_are_named(tmp_path: Path) -> None:
    directory = tiny("qwen2")
    lacks = _with_tensors(directory, tmp_path / "a.gguf", blk__0__attn_q__bias=None)
    with pytest.raises(InvalidRequestError, match=r"it lacks 'blk\.0\.attn_q\.bias', of a model"):
        checkpoint_of(lacks)
    no_sinks = _with_tensors(tiny("gpt_oss"), tmp_path / "c.gguf", blk__1__attn_sinks__weight=None)
    with pytest.raises(InvalidRequestError, match=r"it lacks 'blk\.1\.attn_sinks\.weight', of a"):
        checkpoint_of(no_sinks)
    strange = _with_tensors(
        directory, tmp_path / "b.gguf", blk__0__ssm_a=stored(np.ones(8, np.float32))
    )
    with pytest.raises(InvalidRequestError, match=r"has 'blk\.0\.ssm_a', which a model of qwen2"):
        checkpoint_of(strange)


def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    directory = tiny("qwen2")
    hidden = json.loads((directory / "config.json").read_text())["hidden_size"]
    file = _with_tensors(
        directory, tmp_path / "a.gguf", output_norm__weight=stored(np.full(hidden, np.nan, "f4"))
    )
    (norm,) = (tensor for tensor in stored_tensors(file) if tensor.name == "model.norm.weight")
    with pytest.raises(InvalidRequestError, match=r"tensor model\.norm\.weight has .* no numbers"):
        read_values(norm)


def test_unknown_divisors_of_the_frequencies_are_refused(tmp_path: Path) -> None:
    strange = stored(np.array([1.0, 3.0, 2.0, 8.0], np.float32))
    file = _with_tensors(tiny("llama"), tmp_path / "a.gguf", rope_freqs__weight=strange)
    with pytest.raises(InvalidRequestError, match="of no scaling that is known"):
        checkpoint_of(file)
