"""Data-parallel ranks: what words and settings say of them, and what each gets of the machine."""

from pathlib import Path
from typing import Any

import pytest

from inlay import engine as engines
from inlay.base.errors import InvalidRequestError
from inlay.engine.ranks import has_experts, ranks_of, tied, with_ranks
from inlay.engine.settings import EngineSettings
from inlay.engine.torch import threads
from tests.models import tiny


def settings(*words: str, **more: Any) -> EngineSettings:
    return EngineSettings.of(
        **{"model": "m", "engine": "vllm", "engine_arguments": list(words)} | more
    )


@pytest.mark.parametrize(
    "words",
    [
        ("--data-parallel-size", "4", "--data-parallel-rank", "2"),
        ("--data-parallel-size=4", "--data_parallel_rank=2"),
        ("-dp", "4", "-dpn", "2"),
        ("-dp4", "-dpn2"),
        ("-dp=4", "--data_parallel-rank", "2"),
        ("-dp2", "-dp", "4", "-dpn2"),
    ],
)
def test_vllms_words_for_ranks_are_inlays_own_and_the_others_stay(words: tuple[str, ...]) -> None:
    found = with_ranks(
        settings("--seed", "5", *words, "-dpa", "10.0.0.1", "--data-parallel-rpc-port", "9")
    )
    assert (found.devices.data_parallel_size, found.devices.data_parallel_rank) == (4, 2)
    assert found.library.engine_arguments == [
        "--seed",
        "5",
        "-dpa",
        "10.0.0.1",
        "--data-parallel-rpc-port",
        "9",
    ]
    (rank,) = ranks_of(found, {})
    assert rank.settings is found
    assert not rank.environment


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [
        (("--data-parallel-size", "many"), {}, "--data-parallel-size takes a number, got 'many'"),
        (("-dp",), {}, "-dp takes a number, got ''"),
        (
            ("-dp", "2"),
            {"data_parallel_size": 2},
            "--data-parallel-size is given to inlay and, after --",
        ),
        (
            ("--data-parallel-hybrid-lb",),
            {},
            "each data-parallel rank runs as an engine of its own",
        ),
        (
            ("-dp2",),
            {"data_parallel_size": 2},
            "--data-parallel-size is given to inlay and, after --",
        ),
        (("--data_parallel_size", "-1"), {}, "--data_parallel_size takes a number, got '-1'"),
        (("-dpl1",), {}, "-dpl: each data-parallel rank runs as an engine of its own"),
        (("-dpm",), {}, "each data-parallel rank runs as an engine of its own"),
        (("-dpl=1",), {}, "each data-parallel rank runs as an engine of its own"),
    ],
)
def test_words_that_cannot_be_followed_are_refused(
    words: tuple[str, ...], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        with_ranks(settings(*words, **more))


def test_a_rank_that_does_not_exist_is_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidRequestError, match="with --data-parallel-size 2 ranks are 0 to 1"):
        engines.check(settings(data_parallel_size=2, data_parallel_rank=2))
    with pytest.raises(InvalidRequestError, match="at least 1, got 0"):
        engines.check(with_ranks(settings("-dp", "0")))


def test_ranks_share_devices_and_cores_and_each_knows_which_it_is() -> None:
    found = ranks_of(settings("-tp", "2", "--pipeline-parallel-size=2", data_parallel_size=2), {})
    assert [rank.settings.devices.data_parallel_rank for rank in found] == [0, 1]
    assert [rank.environment["CUDA_VISIBLE_DEVICES"] for rank in found] == ["0,1,2,3", "4,5,6,7"]
    given = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}
    named = ranks_of(settings(data_parallel_size=3), given)
    assert [rank.environment["CUDA_VISIBLE_DEVICES"] for rank in named] == [
        "GPU-a",
        "GPU-b",
        "GPU-c",
    ]
    with pytest.raises(
        InvalidRequestError, match="4 ranks of 1 need 4 devices; CUDA_VISIBLE_DEVICES names 3"
    ):
        ranks_of(settings(data_parallel_size=4), given)
    ours = ranks_of(settings(engine="torch", device="cpu", data_parallel_size=2), given)
    assert [rank.settings.devices.num_threads for rank in ours] == [
        max(1, threads.count(None) // 2)
    ] * 2
    assert not any(rank.environment for rank in ours)
    chosen = ranks_of(settings(engine="torch", num_threads=3, data_parallel_size=2), {})
    assert [rank.settings.devices.num_threads for rank in chosen] == [3, 3]


@pytest.mark.parametrize(
    ("words", "each"),
    [
        (("--seed", "5"), 1),
        (("--tensor_parallel_size", "2"), 2),
        (("--tensor_parallel_size=2",), 2),
        (("-tp2",), 2),
        (("-tp=2", "-pp2"), 4),
        (("--prefill-context-parallel-size", "3"), 3),
        (("-tp", "2", "-pp", "2", "-pcp", "2"), 8),
        (("-pcp2", "--decode-context-parallel-size", "2", "-dcp", "2"), 2),
        (("-tp4", "--tensor-parallel-size", "2"), 2),
    ],
)
def test_a_rank_has_a_device_for_each_of_vllms_processes(words: tuple[str, ...], each: int) -> None:
    """Each is one of tensor, pipeline and prefill-context parallelism.

    Of a flag given twice the last counts, as in vLLM.
    """
    found = ranks_of(settings(*words, data_parallel_size=2), {})
    names = [str(number) for number in range(2 * each)]
    shown = [rank.environment["CUDA_VISIBLE_DEVICES"] for rank in found]
    assert shown == [",".join(names[:each]), ",".join(names[each:])]


@pytest.mark.parametrize("word", ["-tp", "-tp=two", "--tensor_parallel_size"])
def test_a_count_of_devices_that_is_no_number_is_refused(word: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{word.partition('=')[0]} takes a number"):
        ranks_of(settings(word, data_parallel_size=2), {})


def test_only_experts_of_vllm_cannot_go_on_without_the_other_ranks(tmp_path: Path) -> None:
    dense, sparse = tiny("llama"), tmp_path
    (tmp_path / "config.json").write_text('{"text_config": {"num_experts": 4}}')
    assert (has_experts(dense), has_experts(sparse)) == (False, True)
    assert tied(settings(model=str(sparse), data_parallel_size=2))
    assert not tied(settings(model=str(sparse)))
    assert not tied(settings(model=str(dense), data_parallel_size=2))
    assert not tied(settings(model=str(sparse), engine="torch", data_parallel_size=2))
