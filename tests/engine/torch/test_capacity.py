import pytest
import torch

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.cache.kv_layout import available_memory, num_pages

GIB = 1 << 30


def pages(
    available: int = GIB,
    max_model_len: int = 4096,
    windows: tuple[int | None, ...] = (None,),
    asked: int | None = None,
    **settings: float,
) -> int:
    return num_pages(
        EngineSettings.of(model="m", **({"block_size": 16} | settings)),
        page_bytes=1024,
        windows=windows,
        max_model_len=max_model_len,
        available=available,
        asked=asked,
    )


def test_a_share_of_a_gpu_is_the_size_unless_bytes_are_asked_for() -> None:
    assert pages(asked=400 * 1024, gpu_memory_utilization=0.9) == 400
    assert (
        pages(asked=400 * 1024, gpu_memory_utilization=0.9, kv_cache_memory_bytes=300 * 1024) == 300
    )


def test_a_share_that_holds_no_full_context_is_refused() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"gpu_memory_utilization 0\.5 leaves 1024 beside the weights"
    ):
        pages(asked=1024, gpu_memory_utilization=0.5)
    with pytest.raises(InvalidRequestError, match="leaves 0 beside the weights"):
        pages(asked=-5, gpu_memory_utilization=0.5)


def test_the_size_asked_for_is_taken() -> None:
    assert pages(kv_cache_memory_bytes=300 * 1024 + 7) == 300


def test_a_size_that_holds_no_full_context_is_refused() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"needs 262144 bytes of KV cache, kv_cache_memory_bytes is 1024"
    ):
        pages(kv_cache_memory_bytes=1024)


def test_without_a_size_there_is_room_for_many_short_sequences() -> None:
    assert pages(max_num_seqs=10) == 10 * 32
    assert pages(max_num_seqs=10, block_size=64) == 10 * 8
    assert pages(max_num_seqs=10, max_model_len=100) == 10 * 7


def test_without_a_size_there_is_room_for_one_long_sequence() -> None:
    assert pages(max_num_seqs=2) == 256


def test_layers_with_windows_take_room_for_their_windows_and_a_step() -> None:
    windows = (None, 128, 128)
    # A window of 128 and 64 positions of a step touch 13 pages, one position 9.
    assert pages(max_num_seqs=2, windows=windows, max_num_batched_tokens=64) == 256 + 2 * 13
    assert pages(max_num_seqs=64, windows=windows, max_num_batched_tokens=64) == 64 * (32 + 2 * 9)
    assert pages(max_num_seqs=1, windows=(128,), max_num_batched_tokens=4096) == 256


def test_without_a_size_a_quarter_of_the_memory_is_the_most() -> None:
    assert pages(available=4 * 300 * 1024, max_num_seqs=64) == 300


def test_too_little_memory_for_one_context_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(
        EngineError, match=r"a quarter of the available memory is 262143: lower max_model_len"
    ):
        pages(available=4 * 256 * 1024 - 1)


def test_available_memory_is_known() -> None:
    assert available_memory(torch.device("cpu")) > 1 << 20
