"""Facts about a model's media from its files, and precise refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from inlay.base.errors import InvalidRequestError
from inlay.media.families import REFUSED, spec_of
from inlay.media.geometry import PatchGrid
from inlay.media.spec import max_items_of
from tests.media import processors
from tests.scratch import scratch


def write(directory: Path, **files: Any) -> Path:
    for name, value in files.items():
        (directory / f"{name}.json").write_text(
            value if isinstance(value, str) else json.dumps(value), encoding="utf-8"
        )
    return directory


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_rows_do_not_describe_is_refused_by_name_and_reason(
    family: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=f"'{family}' are not served: .{{20}}"):
        spec_of(write(tmp_path, config={"model_type": family}))


def test_an_unknown_family_with_an_encoder_is_refused_and_one_without_has_no_media(
    tmp_path: Path,
) -> None:
    assert spec_of(write(tmp_path, config={"model_type": "llama"})) is None
    write(tmp_path, config={"model_type": "new", "vision_config": {"patch_size": 14}})
    with pytest.raises(InvalidRequestError, match=r"'new' models are not supported; .*llava"):
        spec_of(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": "{"}, "config.json is not JSON"),
        ({"config": "[" * 100_000}, "config.json is not JSON"),
        ({"config": "[]"}, "not a JSON object"),
        ({"preprocessor_config": {"patch_size": "14"}}, "patch_size = '14'; an integer from 1"),
        ({"preprocessor_config": {"patch_size": 0}}, "patch_size = '0'; an integer from 1"),
        ({"preprocessor_config": {"merge_size": 2**80}}, "merge_size"),
        ({"preprocessor_config": {"size": [1, 2]}}, "not an object"),
        ({"preprocessor_config": {"min_pixels": "3136"}}, "min_pixels = '3136'; an integer"),
        ({"processor_config": {"image_token": 5}}, "not a string"),
        ({"processor_config": {"image_token": "<absent>"}}, "no token '<absent>'"),
        ({"tokenizer": "{}"}, "tokenizer.json cannot be read"),
    ],
)
def test_files_that_say_nothing_usable_are_refused(
    files: dict[str, Any], message: str, tmp_path: Path
) -> None:
    processors.tokenizer(["<|image_pad|>"]).save_pretrained(tmp_path)
    write(tmp_path, config={"model_type": "qwen2_vl"})
    assert spec_of(tmp_path) is not None
    with pytest.raises(InvalidRequestError, match=message):
        spec_of(write(tmp_path, **files))


def test_the_encoders_identity_is_that_of_weights_settings_and_backend(tmp_path: Path) -> None:
    processors.tokenizer(["<|image_pad|>"]).save_pretrained(tmp_path)
    write(tmp_path, config={"model_type": "qwen2_vl"}, preprocessor_config={"patch_size": 14})
    specs = [
        spec_of(tmp_path, weights_id="a"),
        spec_of(tmp_path, weights_id="b"),
        spec_of(tmp_path, weights_id="a", backend="torchvision"),
    ]
    write(tmp_path, preprocessor_config={"patch_size": 14, "image_mean": [0.5]})
    specs.append(spec_of(tmp_path, weights_id="a"))
    assert len({spec.encoder_id for spec in specs if spec is not None}) == 4


def test_both_names_of_the_bounds_of_an_area_are_read(tmp_path: Path) -> None:
    processors.tokenizer(["<|image_pad|>"]).save_pretrained(tmp_path)
    write(
        tmp_path,
        config={"model_type": "qwen2_vl"},
        preprocessor_config={"min_pixels": 3136, "max_pixels": 50_000},
    )
    spec = spec_of(tmp_path, max_items={"image": 2})
    assert spec is not None
    assert isinstance(spec.image, PatchGrid)
    assert (spec.image.min_pixels, spec.image.max_pixels) == (3136, 50_000)
    settings = spec.processor_settings("low")
    assert settings == {"size": {"shortest_edge": 3136, "longest_edge": 50_000}}


def test_a_prompt_with_more_items_than_allowed_or_of_another_kind_is_refused() -> None:
    spec = processors.llava(28).spec
    spec.check_counts({"image": 100, "audio": 0})
    with pytest.raises(InvalidRequestError, match="takes no audio; kinds of media it takes: image"):
        spec.check_counts({"audio": 1})
    directory = scratch("limited")
    processors.tokenizer(["<|image_pad|>"]).save_pretrained(directory)
    limited = spec_of(write(directory, config={"model_type": "qwen2_vl"}), max_items={"image": 2})
    assert limited is not None
    limited.check_counts({"image": 2})
    with pytest.raises(InvalidRequestError, match="at most 2 image"):
        limited.check_counts({"image": 3})


def test_settings_of_the_processor_may_be_changed_where_they_decide_rows(tmp_path: Path) -> None:
    processors.tokenizer(["<|image_pad|>"]).save_pretrained(tmp_path)
    write(tmp_path, config={"model_type": "qwen2_vl"}, preprocessor_config={"min_pixels": 3136})
    plain = spec_of(tmp_path)
    spec = spec_of(tmp_path, processor_kwargs={"max_pixels": 50_000})
    assert plain is not None
    assert spec is not None
    assert spec.encoder_id != plain.encoder_id
    assert spec.processor_settings(None)["size"] == {"shortest_edge": 3136, "longest_edge": 50_000}
    refused = (
        "'qwen2_vl' model is not told image_mean, max_patches; allowed: max_pixels, min_pixels"
    )
    with pytest.raises(InvalidRequestError, match=refused):
        spec_of(tmp_path, processor_kwargs={"image_mean": [0.5], "max_patches": 2})
    with pytest.raises(InvalidRequestError, match=r"--mm-processor-kwargs says max_pixels = '-1'"):
        spec_of(tmp_path, processor_kwargs={"max_pixels": -1})


def test_limits_are_counts_by_kind_as_vllm_writes_them() -> None:
    value = {"image": 2, "audio": {"count": 0}, "video": {"count": 1, "width": 512}}
    assert max_items_of(value) == {"image": 2, "audio": 0, "video": 1}
    wrong: object
    for wrong in ([], {"text": 1}, {"image": -1}, {"image": True}, {"image": {"width": 5}}):
        with pytest.raises(InvalidRequestError, match="limits of media are"):
            max_items_of(wrong)
