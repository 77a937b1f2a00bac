"""Settings of inlay and words after -- that reach vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest

from inlay import engine as engines
from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from tests.engines.starting import SECRET
from tests.engines.vllm.serving import FLAGS
from tests.models import make


def arguments(directory: Path, *words: str, **settings: Any) -> Any:
    from inlay.engine.vllm.arguments import engine_args

    return engine_args(
        EngineSettings.of(
            model=str(directory), engine="vllm", engine_arguments=list(words), **settings
        ),
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
    assert (found.max_model_len, found.max_num_seqs, found.block_size, found.max_logprobs) == (
        128,
        7,
        64,
        5,
    )
    assert (found.kv_cache_memory_bytes, found.dtype, found.served_model_name) == (
        1 << 22,
        "bfloat16",
        ["a", "b"],
    )
    assert (found.enable_prefix_caching, found.enforce_eager) == (False, True)
    # One takes another's place while it is loaded, and on a CPU vLLM needs one more.
    assert (found.enable_lora, found.max_loras, found.max_cpu_loras, found.max_lora_rank) == (
        True,
        5,
        5,
        32,
    )


def test_words_after_the_dashes_reach_vllm_untouched(directory: Path) -> None:
    found = arguments(
        directory, "--seed", "5", "--scheduling-policy=priority", "--kv-events-config", "{}"
    )
    assert (found.seed, found.scheduling_policy) == (5, "priority")
    assert found.kv_events_config is not None


def test_batches_come_after_all_others_unless_another_policy_is_chosen(directory: Path) -> None:
    assert arguments(directory).scheduling_policy == "priority"
    for words in (("--scheduling-policy", "fcfs"), ("--scheduling_policy=fcfs",)):
        assert arguments(directory, *words).scheduling_policy == "fcfs"


def test_settings_in_vllms_own_file_are_not_overridden_by_defaults(
    directory: Path, tmp_path: Path
) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("scheduling-policy: fcfs\ndtype: bfloat16\n")
    found = arguments(directory, "--config", str(file))
    assert (found.scheduling_policy, found.dtype) == ("fcfs", "bfloat16")
    assert arguments(directory, "--config", str(file), dtype="float32").dtype == "float32"


def test_a_dtype_after_the_dashes_is_taken_in_each_spelling(directory: Path) -> None:
    for words in (("--dtype", "bfloat16"), ("--dtype=bfloat16",)):
        assert arguments(directory, *words).dtype == "bfloat16"


def test_only_ranks_of_experts_know_of_one_another(directory: Path, tmp_path: Path) -> None:
    ranks = {"data_parallel_size": 2, "data_parallel_rank": 1}
    dense = arguments(directory, **ranks)
    assert (dense.data_parallel_size, dense.data_parallel_rank) == (1, None)
    assert dense.create_engine_config().parallel_config.data_parallel_size == 1
    words = ("--data-parallel-address", "10.0.0.1", "--enable-expert-parallel")
    sparse = arguments(make("qwen2_moe", tmp_path / "sparse"), *words, **ranks)
    assert (sparse.data_parallel_size, sparse.data_parallel_rank) == (2, 1)
    config = sparse.create_engine_config().parallel_config
    assert (config.data_parallel_external_lb, config.data_parallel_index) == (True, 1)
    assert (config.data_parallel_master_ip, config.enable_expert_parallel) == ("10.0.0.1", True)


def test_each_rank_of_a_dense_model_publishes_at_ports_of_its_own(directory: Path) -> None:
    from inlay.engine.vllm.cache_events import VllmCacheEvents

    given = {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:6557",
    }
    config = arguments(directory, kv_events_config=json.dumps(given)).create_engine_config()
    VllmCacheEvents(SECRET).turn_on(config, rank=2)
    found = config.kv_events_config
    assert (found.endpoint, found.replay_endpoint) == ("tcp://*:5559", "tcp://*:6559")


def test_events_are_turned_on_where_prefixes_are_cached_and_left_where_they_are_not(
    directory: Path,
) -> None:
    from inlay.engine.vllm.cache_events import VllmCacheEvents

    off = {"enable_kv_cache_events": False}
    for more in ({}, {"kv_events_config": json.dumps(off)}):
        config = arguments(directory, **more).create_engine_config()
        VllmCacheEvents(SECRET).turn_on(config)
        assert config.kv_events_config.enable_kv_cache_events
        assert config.kv_events_config.endpoint.startswith("ipc://")
    config = arguments(directory, enable_prefix_caching=False).create_engine_config()
    VllmCacheEvents(SECRET).turn_on(config)
    assert config.kv_events_config is None


async def test_the_guard_against_nan_is_not_turned_off_by_the_environment(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "0")
    engine = engines.create(EngineSettings.of(model=str(directory), **FLAGS), SECRET)
    with pytest.raises(InvalidRequestError, match="VLLM_COMPUTE_NANS_IN_LOGITS=0 is set"):
        await engine.start()
    await engine.close()


async def test_sleep_is_refused_at_the_start_where_the_platform_has_none(directory: Path) -> None:
    engine = engines.create(
        EngineSettings.of(model=str(directory), enable_sleep_mode=True, **FLAGS), SECRET
    )
    with pytest.raises(
        InvalidRequestError, match=r"vLLM refuses the model or its settings: .*[Ss]leep"
    ):
        await engine.start()
    await engine.close()


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
        (("--max_num_seqs=5",), {"max_num_seqs": 6}, "--max-num-seqs is given to inlay and"),
        (("--no-enforce-eager",), {"enforce_eager": True}, "--enforce-eager is given to inlay and"),
        (("--model", "other"), {}, "--model is given to inlay and"),
        ((), {"device": "cuda"}, "--device cuda: this vLLM is built for cpu"),
        ((), {"connector": ["pd"]}, "pd joins connectors"),
        ((), {"batch_invariant": True}, "on CUDA alone, and this one is built for cpu"),
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
