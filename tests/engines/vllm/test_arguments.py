"""What of inlay's settings reaches vLLM, and how the words after -- do."""

from pathlib import Path
from typing import Any

import pytest

from inlay.engine.settings import EngineSettings
from inlay.errors import InvalidRequestError


def arguments(directory: Path, *words: str, **settings: Any) -> Any:
    from inlay.engine.vllm.arguments import engine_args

    return engine_args(
        EngineSettings(model=str(directory), engine="vllm", engine_arguments=list(words), **settings),
        directory,
    )


def test_what_nobody_gave_is_vllms_own_default(directory: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    own, found = AsyncEngineArgs(model=str(directory)), arguments(directory)
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len"):
        assert getattr(found, name) == getattr(own, name)
    assert found.dtype == "float32"


def test_settings_of_the_same_name_reach_vllm(directory: Path) -> None:
    found = arguments(
        directory, max_model_len=128, max_num_seqs=7, block_size=64, max_logprobs=5, kv_cache_memory_bytes=1 << 22,
        enable_prefix_caching=False, enforce_eager=True, dtype="bfloat16", served_model_name=["a", "b"],
        enable_lora=True, max_loras=3, max_lora_rank=20,
    )  # fmt: skip
    assert (found.max_model_len, found.max_num_seqs, found.block_size, found.max_logprobs) == (128, 7, 64, 5)
    assert (found.kv_cache_memory_bytes, found.dtype, found.served_model_name) == (
        1 << 22,
        "bfloat16",
        ["a", "b"],
    )
    assert (found.enable_prefix_caching, found.enforce_eager) == (False, True)
    # One takes another's place while it is loaded, and on a CPU vLLM needs one more.
    assert (found.enable_lora, found.max_loras, found.max_cpu_loras, found.max_lora_rank) == (True, 5, 5, 32)


def test_words_after_the_dashes_reach_vllm_untouched(directory: Path) -> None:
    found = arguments(directory, "--seed", "5", "--scheduling-policy=priority", "--kv-events-config", "{}")
    assert (found.seed, found.scheduling_policy) == (5, "priority")
    assert found.kv_events_config is not None


@pytest.mark.parametrize(
    ("words", "settings", "said"),
    [
        (("--nonsense",), {}, "vLLM's arguments: unrecognized arguments: --nonsense"),
        (("--max-num-seqs", "many"), {}, "vLLM's arguments: .*many"),
        (
            ("--max-num-seqs", "5"),
            {"max_num_seqs": 6},
            "--max-num-seqs is given to inlay and, after --, to vLLM",
        ),
        (("--no-enforce-eager",), {"enforce_eager": True}, "--enforce-eager is given to inlay and"),
        (("--model", "other"), {}, "--model is given to inlay and"),
        ((), {"device": "cuda"}, "--device cuda: this vLLM is built for cpu"),
        ((), {"connector": ["pd"]}, "pd joins connectors"),
    ],
)
def test_what_vllm_does_not_know_or_is_told_twice_is_refused(
    directory: Path, words: tuple[str, ...], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        arguments(directory, *words, **settings)


def test_a_connector_reaches_vllm_as_its_configuration(directory: Path) -> None:
    found = arguments(directory, connector=["kvbm", "nixl"])
    assert found.kv_transfer_config.kv_connector == "PdConnector"


def test_adapters_beside_rows_leave_the_embedding_table_alone(directory: Path) -> None:
    assert arguments(directory, enable_lora=True).lora_target_modules is None
    found = arguments(directory, "--enable-prompt-embeds", enable_lora=True)
    assert "q_proj" in found.lora_target_modules
    assert not any("embed" in name for name in found.lora_target_modules)
