"""Adapters' files: what is right is read, whatever else is a clear refusal that costs nothing."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import peft
import pytest
from hypothesis import HealthCheck, given, settings, strategies
from safetensors.numpy import save_file

from inlay.adapter import LoraFiles, PromptFiles, open_adapter
from inlay.adapter.config import LoraConfig, parse_config
from inlay.adapter.files import check_finite, check_fits, content_id, elements
from inlay.base.errors import InlayError, InvalidRequestError, NotFoundError
from tests.adapter.conftest import MODULE, Write, encoded, lora_config, pair, tensors


def test_a_lora_is_read_as_it_was_written(write: Write) -> None:
    files = open_adapter(write())
    assert isinstance(files, LoraFiles)
    (name,) = files.modules
    assert (name, files.rank, files.modules[name].scale) == (
        "model.layers.0.self_attn.q_proj",
        2,
        2.0,
    )
    expected = pair()[f"{MODULE}.lora_A.weight"].astype(np.float32)
    assert np.array_equal(elements(files.modules[name].down), expected)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_float_dtype_is_read(write: Write, dtype: Any) -> None:
    path = write()
    array = np.arange(8).reshape(2, 4).astype(dtype)
    save_file(
        {f"{MODULE}.lora_A.weight": array, f"{MODULE}.lora_B.weight": array.T.copy()},
        path / "adapter_model.safetensors",
    )
    files = open_adapter(path)
    assert isinstance(files, LoraFiles)
    check_finite(files)
    (found,) = files.modules.values()
    assert np.array_equal(elements(found.down).astype(np.float64), array.astype(np.float64))


def test_trained_rows_are_read(write: Write) -> None:
    config = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3, "token_dim": 4}
    files = open_adapter(write(config, tensors({"prompt_embeddings": np.ones((3, 4))})))
    assert isinstance(files, PromptFiles)
    assert (files.config.num_positions, elements(files.rows).shape) == (3, (3, 4))


@pytest.mark.parametrize(
    ("options", "modules"),
    [
        ({"r": 8, "lora_alpha": 16}, ["layers.0.q_proj"]),
        ({"r": 8, "lora_alpha": 16, "use_rslora": True}, ["layers.0.q_proj"]),
        (
            {
                "r": 8,
                "lora_alpha": 16,
                "rank_pattern": {"q_proj": 4, "layers.1.v_proj": 2, "^model.layers.2.k_proj": 16},
                "alpha_pattern": {"v_proj": 3, "layers.[12].k_proj": 5, "(o|up)_proj": 7},
            },
            [
                f"model.layers.{n}.{m}_proj"
                for n in range(3)
                for m in ("q", "v", "k", "o", "up", "down")
            ],
        ),
    ],
)
def test_ranks_and_scales_are_pefts(options: dict[str, Any], modules: list[str]) -> None:
    config = parse_config(json.dumps({"peft_type": "LORA", **options}).encode())
    assert isinstance(config, LoraConfig)
    theirs = peft.LoraConfig(**options)
    from peft.utils.other import get_pattern_key

    for module in modules:
        rank = theirs.rank_pattern.get(
            get_pattern_key(theirs.rank_pattern.keys(), module), theirs.r
        )
        alpha = theirs.alpha_pattern.get(
            get_pattern_key(theirs.alpha_pattern.keys(), module), theirs.lora_alpha
        )
        assert config.rank_of(module) == rank
        assert config.scale_of(module, int(rank)) == alpha / (
            rank**0.5 if theirs.use_rslora else rank
        )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"peft_type": "IA3"}, "IA3.*supported: LORA, PROMPT_TUNING"),
        ({"peft_type": None}, "None"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [1]}, "alora"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"init_lora_weights": "loftq"}, "loftq"),
        ({"some_new_option": 3}, "some_new_option"),
        ({"r": 0}, "r must be a whole number"),
        ({"r": True}, "r must be a whole number"),
        ({"r": "8"}, "r must be a whole number"),
        ({"r": 2**40}, "r must be a whole number"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number"),
        ({"lora_alpha": None}, "lora_alpha must be a number"),
        ({"rank_pattern": {"(a+)+$": 2}}, "repeats nothing"),
        ({"rank_pattern": {"a" * 600: 2}}, "at most 512"),
        ({"rank_pattern": {"(a|.)" * 60 + "b": 2}}, "at most 256 ways"),
        ({"rank_pattern": {"(": 2}}, "pattern"),
        ({"rank_pattern": {"a|)" * 200_000: 2}}, "at most 512"),
        ({"rank_pattern": ["q_proj"]}, "must be an object"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern must be"),
        ({"alpha_pattern": {"q_proj": "4"}}, "alpha_pattern must be"),
        ({"r": 3}, "says rank 3"),
    ],
)
def test_a_configuration_that_asks_for_something_else_is_refused_by_name(
    write: Write, change: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        open_adapter(write(lora_config(**change)))


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"null", b'"LORA"', b"{", b"\xff", b"[" * 100_000, b'{"peft_type": "LORA", "r": 1e400}',
     b'{"peft_type": "LORA", "r": ' + b"9" * 5000 + b"}", b'{"peft_type": "LORA", "r": 2, "lora_alpha": NaN}'],
)  # fmt: skip
def test_what_is_no_configuration_is_refused(write: Write, raw: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        open_adapter(write(raw))


def header_of(**change: Any) -> bytes:
    """The file of `pair`, with something else in the entry of its first tensor."""
    content = tensors(pair())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[f"{MODULE}.lora_A.weight"].update(change)
    return encoded(header, content[8 + length :])


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        (b"", "has 0 bytes"),
        (b"\x00" * 7, "cut short: it has 7 bytes"),
        (b"\xff" * 64, "header of"),
        (encoded({}), "no tensors"),
        (encoded({"__metadata__": {"a": "b"}}), "no tensors"),
        (encoded(b"{"), "it has 9 bytes"),
        (encoded(b"{ "), "not a safetensors file"),
        (encoded(b'{"\xff": 1}'), "not a safetensors file"),
        (encoded(b'{"a": ' + b"[" * 100_000), "not a safetensors file"),
        (encoded(b'{"a": {"dtype": "F32", "shape": ' + b"[" * 100_000), "not a safetensors file"),
        (encoded(b'{"a": 5}'), "not a safetensors file"),
        ((2**62).to_bytes(8, "little") + b"{}", "say a header of"),
        (tensors(pair())[:-1], "cut short"),
        (header_of(shape=[2**31, 2**31]), "bytes"),
        (header_of(shape=[-2, 4]), "a matrix is needed"),
        (header_of(shape=[0, 4]), "a matrix is needed"),
        (header_of(shape=[8]), "a matrix is needed"),
        (header_of(shape=[2, 2, 2]), "a matrix is needed"),
        (header_of(data_offsets=[0, 1 << 40]), "cut short"),
        (header_of(data_offsets=[8, 0]), "would lie at"),
        (header_of(data_offsets=[-8, 24]), "would lie at"),
        (header_of(dtype="I64"), "I64"),
        (header_of(dtype="F16"), "bytes"),
        (header_of(dtype="x" * 500), r"\.\.\."),
        (tensors({k: v for k, v in pair().items() if "lora_A" in k}), "without its lora_B"),
        (tensors({k: v for k, v in pair().items() if "lora_B" in k}), "is not one of a LoRA"),
        (tensors({**pair(), "base_model.model.lm_head.weight": np.ones((2, 2))}), "lm_head"),
        (tensors({**pair(), f"{MODULE}.lora_magnitude_vector": np.ones((2, 2))}), "magnitude"),
        (
            tensors({"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((2, 9))}),
            "embedding_A",
        ),
        (tensors(pair(rank=5)), r"shapes \(5, 4\) and \(6, 5\); its configuration says rank 2"),
    ],
)
def test_a_weights_file_that_lies_is_refused(write: Write, weights: bytes, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        open_adapter(write(None, weights))


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        ({"num_virtual_tokens": 3, "token_dim": 5}, {"prompt_embeddings": np.ones((3, 4))}),
        ({"num_virtual_tokens": 2, "token_dim": 4}, {"prompt_embeddings": np.ones((3, 4))}),
        ({"num_virtual_tokens": 3, "token_dim": 4}, {"prompt_embedding": np.ones((3, 4))}),
        ({"num_virtual_tokens": 3, "token_dim": 4}, {"prompt_embeddings": np.ones((3, 4)), "b": np.ones((1, 1))}),
        ({"num_virtual_tokens": 3, "token_dim": 4, "num_transformer_submodules": 2}, {"prompt_embeddings": np.ones((6, 4))}),
        ({"token_dim": 4}, {"prompt_embeddings": np.ones((3, 4))}),
    ],
)  # fmt: skip
def test_rows_that_are_not_what_the_configuration_says_are_refused(
    write: Write, config: dict[str, Any], weights: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError):
        open_adapter(write({"peft_type": "PROMPT_TUNING", **config}, tensors(weights)))


def of_pipeline(directory: Path, named: dict[str, Any], configs: object = None) -> Path:
    """A directory in diffusers' form."""
    text = {} if configs is None else {"lora_adapter_metadata": configs}
    if isinstance(configs, dict):
        text = {"lora_adapter_metadata": json.dumps(configs)}
    file = tensors(named)
    length = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + length]) | {"__metadata__": text}
    directory.mkdir(exist_ok=True)
    (directory / "pytorch_lora_weights.safetensors").write_bytes(
        encoded(header, file[8 + length :])
    )
    return directory


def test_patterns_of_all_components_are_bounded_together(tmp_path: Path) -> None:
    ranks = {f"x{n}": 2 for n in range(1400)}
    configs = {
        f"{component}.{name}": value
        for component in ("unet", "text_encoder", "text_encoder_2")
        for name, value in {"r": 2, "lora_alpha": 2, "rank_pattern": ranks}.items()
    }
    with pytest.raises(InvalidRequestError, match="more than 4096 patterns"):
        open_adapter(of_pipeline(tmp_path, pair(module="unet.mid.to_q"), configs))


CLIP = "text_encoder.encoder.layers.0.self_attn.q_proj"


def test_a_lora_of_a_pipeline_has_the_scale_of_its_components_configuration(
    tmp_path: Path,
) -> None:
    random = np.random.default_rng(1)
    named = pair(module="unet.mid.to_q") | {
        f"{CLIP}.lora_linear_layer.down.weight": random.standard_normal((3, 4)),
        f"{CLIP}.lora_linear_layer.up.weight": random.standard_normal((6, 3)),
    }
    for configs, scales in (
        (None, {"unet.mid.to_q": 1.0, CLIP: 1.0}),
        ({"text_encoder.r": 3, "text_encoder.lora_alpha": 6}, {"unet.mid.to_q": 1.0, CLIP: 2.0}),
        (
            {"unet.r": 8, "unet.rank_pattern": {"to_q": 2}, "unet.lora_alpha": 1},
            {"unet.mid.to_q": 0.5, CLIP: 1.0},
        ),
    ):
        files = open_adapter(of_pipeline(tmp_path / "a", named, configs))
        assert isinstance(files, LoraFiles)
        assert {name: pair_.scale for name, pair_ in files.modules.items()} == scales
        assert files.rank == 3
        check_finite(files)
        assert len(content_id(files)) == 32


@pytest.mark.parametrize(
    ("named", "configs", "said"),
    [
        ({f"{CLIP}.lora_A.weight": np.ones((2, 4))}, None, "without its other half"),
        (pair(module=CLIP) | {"lora_te_q.lora_mid": np.ones((2, 2))}, None, "not one of a LoRA of"),
        (pair(module=CLIP), {"text_encoder.r": 5, "text_encoder.lora_alpha": 5}, "says rank 5"),
        (pair(module=CLIP), {"text_encoder.use_dora": True}, "use_dora: DoRA are not supported"),
        (pair(module=CLIP), "[1]", "is not an object in JSON"),
        (pair(module=CLIP), "{", "is not an object in JSON"),
        (pair(module=CLIP), 7, "the metadata of .* are no texts"),
    ],
)
def test_a_lora_of_a_pipeline_that_is_wrong_is_refused_by_name(
    tmp_path: Path, named: dict[str, Any], configs: object, said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        open_adapter(of_pipeline(tmp_path / "a", named, configs))


def test_pickled_weights_are_refused_by_name_and_never_opened(write: Write) -> None:
    path = write()
    (path / "adapter_model.safetensors").unlink()
    os.mkfifo(path / "adapter_model.bin")  # opening it would block for ever
    with pytest.raises(InvalidRequestError, match=r"adapter_model\.bin, which is pickled"):
        open_adapter(path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_what_is_no_regular_file_is_refused_at_once(write: Write, name: str) -> None:
    path = write()
    for make in (
        os.mkfifo,
        lambda where: where.mkdir(),
        lambda where: where.symlink_to("/dev/zero"),
    ):
        (path / name).unlink() if not (path / name).is_dir() else (path / name).rmdir()
        make(path / name)
        with pytest.raises(InvalidRequestError, match="not a regular file"):
            open_adapter(path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_what_is_not_there_is_not_found(write: Write, name: str) -> None:
    path = write()
    (path / name).unlink()
    with pytest.raises(NotFoundError, match=f"it has no {name}"):
        open_adapter(path)
    with pytest.raises(NotFoundError):
        open_adapter(path / "adapter_config.json")


def test_too_large_an_adapter_is_refused_before_it_is_read(write: Write) -> None:
    path = write()
    with (path / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(InvalidRequestError, match="--max-lora-bytes"):
        open_adapter(path, max_bytes=1 << 30)
    with (path / "adapter_config.json").open("r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(InvalidRequestError, match=r"adapter_config\.json has"):
        open_adapter(path)


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_not_the_end(write: Write) -> None:
    path = write()
    files = open_adapter(path)
    with (path / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(200)
    with pytest.raises(InvalidRequestError, match="ended while it was read"):
        check_finite(files)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_every_number_must_be_finite(write: Write, value: float) -> None:
    matrices = pair()
    matrices[f"{MODULE}.lora_B.weight"][5, 1] = value
    files = open_adapter(write(None, tensors(matrices)))
    with pytest.raises(InvalidRequestError, match=r"lora_B\.weight' must be finite"):
        check_finite(files)


def test_an_adapter_is_held_against_the_models_shapes(write: Write) -> None:
    files = open_adapter(write())
    assert isinstance(files, LoraFiles)
    check_fits(files, {"model.layers.0.self_attn.q_proj": (6, 4), "other": (1, 1)})
    with pytest.raises(
        InvalidRequestError, match="8 inputs and 6 outputs here, the adapter takes 4 and gives 6"
    ):
        check_fits(files, {"model.layers.0.self_attn.q_proj": (6, 8)})


def test_the_content_alone_decides_the_id(write: Write, tmp_path: Path) -> None:
    one = content_id(open_adapter(write(directory=tmp_path / "a")))
    assert one == content_id(open_adapter(write(directory=tmp_path / "b")))
    assert one != content_id(
        open_adapter(write(lora_config(lora_alpha=5), directory=tmp_path / "c"))
    )
    changed = tensors({name: value * 2 for name, value in pair().items()})
    assert one != content_id(open_adapter(write(None, changed, directory=tmp_path / "d")))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    position=strategies.integers(0, 600),
    junk=strategies.binary(min_size=1, max_size=24),
    cut=strategies.integers(0, 700),
)
def test_damaged_files_are_refused_and_never_take_memory(
    write: Write, position: int, junk: bytes, cut: int
) -> None:
    content = bytearray(tensors(pair()))
    content[position : position + len(junk)] = junk
    path = write(None, bytes(content[: max(cut, 8)] if cut % 2 else content))
    tracemalloc.start()
    try:
        files = open_adapter(path)
        check_finite(files)
    except InlayError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 20
