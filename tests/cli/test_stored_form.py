"""vLLM's `--quantization`, which names a form that a checkpoint says itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_settings import refusal, serve

FORM = {
    "fp8": "fp8",
    "awq_marlin": "awq",
    "gptq": "gptq",
    "compressed-tensors": "compressed-tensors",
    "modelopt_fp4": "modelopt",
    "modelopt": "modelopt_mxfp8",
    "inc": "auto-round",
}
"""A value of the flag, and what a checkpoint says that vLLM takes for the same."""


@pytest.mark.parametrize("flag", FORM)
def test_vllms_quantization_is_said_to_do_nothing_where_the_checkpoint_has_that_form(
    flag: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": FORM[flag]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = str(tmp_path)
    assert serve(model, "--quantization", flag) == serve(model, "-q", flag) == serve(model)
    assert (
        f"--quantization has no effect: {model} says itself that it is {FORM[flag]}" in caplog.text
    )
    message = refusal(model, environ={"INLAY_QUANTIZATION": "bitsandbytes"})
    assert (
        f"INLAY_QUANTIZATION bitsandbytes: {model} is stored as {FORM[flag]}; allowed: " in message
    )


def test_vllms_quantization_of_a_plain_checkpoint_is_answered_with_what_to_do(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    model = str(tmp_path)
    message = refusal(model, "--quantization", "fp8")
    assert f"--quantization fp8: {model} is not quantised; allowed: " in message
    assert "on a CPU; vLLM's own: --engine vllm -- --quantization fp8" in message
    message = refusal(model, "--quantization", "fp8", "--engine", "vllm")
    assert "; vLLM's own: -- --quantization fp8" in message
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(20))
    assert serve(f"{model}/m.gguf", "--quantization", "gguf") == serve(f"{model}/m.gguf")


@pytest.mark.parametrize(
    ("config", "other", "flag"),
    [
        ({"compression_config": {"format": "pack"}}, "a.json", "compressed-tensors"),
        ({}, "hf_quant_config.json", "modelopt"),
        ({"quantization_config": {"producer": {"name": "modelopt"}}}, "a.json", "modelopt_fp4"),
        ({"text_config": {"quantization_config": {"quant_method": "FP8"}}}, "a.json", "fp8"),
        (
            {
                "model_type": "qwen2_5_omni",
                "thinker_config": {"model_type": "qwen2_5_omni_thinker"},
                "quantization_config": {"quant_method": "compressed_tensors"},
            },
            "a.json",
            "compressed-tensors",
        ),
    ],
)
def test_other_ways_to_say_a_form_are_known(
    config: dict[str, Any], other: str, flag: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (tmp_path / other).write_text("{}")
    model = str(tmp_path)
    assert serve(model, "--quantization", flag) == serve(model)
