"""Words after `--` for vLLM-Omni."""

from pathlib import Path
from typing import Any

import pytest

from inlay.base.errors import InvalidRequestError
from inlay_stages.engines.vllm_omni.arguments import omni_arguments
from tests.engines.vllm_omni.serving import settings


def arguments(*words: str, **more: Any) -> dict[str, Any]:
    return omni_arguments(settings("qwen", engine_arguments=list(words), **more), "float32")


def test_words_are_vllm_omnis_and_settings_go_with_them(tmp_path: Path) -> None:
    file = str(tmp_path / "deploy.yaml")
    assert arguments("--deploy-config", file, "--step-execution", max_num_seqs=3) == {
        "deploy_config": file,
        "step_execution": True,
        "max_num_seqs": 3,
        "enforce_eager": True,
        "dtype": "float32",
    }
    assert arguments() == {"enforce_eager": True, "dtype": "float32"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--colour", "red"], "unrecognized arguments: --colour"),
        (["--model", "other"], "the model is named before --"),
        (["other"], "the model is named before --"),
        (["--port", "1"], "--port is of vLLM-Omni's own server"),
        (["--dtype", "bfloat16"], "--dtype is given to inlay and, after --, to vLLM-Omni"),
        (["--stage-overrides", "[]"], "stage-overrides"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        arguments(*words)


def test_another_device_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="this vLLM-Omni runs on cpu"):
        arguments(device="cuda")
