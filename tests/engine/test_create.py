"""From settings to an engine."""

import sys
from typing import Any, Literal

import pytest

from inlay.base.errors import InvalidRequestError
from inlay.engine import EngineSettings, create
from inlay.engine.options import check_options
from inlay.engine.task import with_task
from inlay.messages.digest import Secret
from tests.models import tiny


@pytest.mark.parametrize(
    ("engine", "module", "remedy"),
    [
        ("torch", "torch", r"pip install 'inlay-server\[torch\]'"),
        ("vllm", "vllm", "--engine-python"),
        ("sglang", "sglang", "--engine-python"),
    ],
)
def test_an_engine_that_is_not_installed_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
    engine: Literal["torch", "vllm", "sglang"],
    module: str,
    remedy: str,
) -> None:
    settings = EngineSettings.of(model=str(tiny("llama")), engine=engine)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidRequestError, match=f"not installed in this environment.*{remedy}"):
        create(settings, Secret(bytes(32)))


def test_an_engine_without_batch_invariance_names_its_own() -> None:
    settings = EngineSettings.of(model="m", engine="sglang", batch_invariant=True)
    with pytest.raises(InvalidRequestError, match="--enable-deterministic-inference after --"):
        check_options(settings)


def test_an_engine_that_fetches_no_pages_says_so() -> None:
    settings = EngineSettings.of(model="m", engine="echo", enable_kv_fetch=True)
    with pytest.raises(InvalidRequestError, match="--enable-kv-fetch is for the torch engine"):
        create(settings, Secret(bytes(32)))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "echo"])
def test_words_to_score_by_are_for_the_torch_engine(engine: str) -> None:
    settings = EngineSettings.of(model="m", engine=engine, task="score", score_tokens=["no", "yes"])
    with pytest.raises(InvalidRequestError, match="--score-tokens is for the torch engine"):
        check_options(settings)


@pytest.mark.extensions("stages")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"part": "vae"}, "--part is for the diffusers and speech engines, not for vllm-omni; it"),
        ({"tensor_parallel_size": 2}, "not for vllm-omni; after -- it is vLLM-Omni's own"),
        ({"enable_lora": True}, "not for vllm-omni"),
    ],
)
def test_what_vllm_omni_does_not_take_is_refused(options: dict[str, Any], said: str) -> None:
    settings = EngineSettings.of(**{"model": "m", "engine": "vllm-omni"} | options)
    with pytest.raises(InvalidRequestError, match=said):
        check_options(settings)
    check_options(with_task(EngineSettings.of(model="m", engine="vllm-omni")))
