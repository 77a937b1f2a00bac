"""A model over two processes answers as in one; what is not divided is refused."""

import asyncio
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch import threads
from inlay.engine.torch.batch import Batch, BatchItem
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.checks import check_settings
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.self_check import judgement
from inlay.engine.torch.self_check.judgement import LAYER_BOUND
from inlay.engine.torch.tensor_parallel import commands
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import Request
from tests import preloaded
from tests.embedding_models import tiny_embedding
from tests.engine.conformance import Receiver, ids, make_request, run
from tests.engine.torch.test_vision_engine import PARTS, prompt_of
from tests.lifelike import lifelike
from tests.models import tiny
from tests.quantised_models import write
from tests.vision_models import vision

TOLERANCE = 2e-4


def settings(directory: Path, size: int = 2, **changes: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "model": str(directory),
        "device": "cpu",
        "num_threads": 1,
        "kv_cache_memory_bytes": 8 << 20,
        "max_num_batched_tokens": 48,
        "tensor_parallel_size": size,
    }
    return EngineSettings.of(**(values | changes))


@asynccontextmanager
async def started(directory: Path, size: int = 2, **changes: Any) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(settings(directory, size, **changes), Secret(bytes(32)))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
    assert not multiprocessing.active_children()


def rows(engine: TorchEngine, count: int) -> Rows:
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, engine.card.hidden_size, generator=generator) * 0.5
    dtype = engine.card.dtype
    data = values.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
    return Rows(Buffer(data), dtype, (count, engine.card.hidden_size))


def requests(engine: TorchEngine) -> list[Request]:
    """Prompts of text, rows and both, longer than a chunk, with every kind of draw."""
    long = Tokens(ids(7, 130))
    return [
        make_request("text", Prompt.of(Tokens(ids(1, 20))), 24, logprobs=5),
        make_request("long", Prompt.of(long), 12, logprobs=5, prompt_logprobs=3),
        make_request("again", Prompt.of(long, Tokens(ids(8, 3))), 12),
        make_request("rows", Prompt.of(rows(engine, 30)), 12, logprobs=5),
        make_request("mixed", Prompt.of(Tokens(ids(2, 9)), rows(engine, 60), Tokens(ids(3, 5))), 12),
        make_request("seed", Prompt.of(Tokens(ids(4, 11))), 24, temperature=1.0, seed=5, top_p=0.9),
        make_request("penalty", Prompt.of(Tokens(ids(5, 40))), 12, repetition_penalty=1.3),
    ]  # fmt: skip


def assert_same(divided: list[Receiver], alone: list[Receiver]) -> None:
    for one, other in zip(divided, alone, strict=True):
        assert one.last.error is None, one.last.error
        assert one.output == other.output, one.request.id
        found, expected = (
            [entry.logprob for delta in receiver.deltas for entry in delta.logprobs]
            for receiver in (one, other)
        )
        assert found == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3_moe", *(pytest.param(each, marks=pytest.mark.slow) for each in ("llama3", "mistral", "qwen3", "gemma2", "gemma3_text", "qwen2_moe", "mixtral"))]
)  # fmt: skip
async def test_two_ranks_answer_as_one_process(family: str) -> None:
    async with started(tiny(family), 1) as engine:
        alone = await run(engine, *requests(engine))
    async with started(tiny(family)) as engine:
        assert_same(await run(engine, *requests(engine)), alone)
        # From the cache, of which each rank has its heads.
        (hit,) = await run(engine, make_request("hit", Prompt.of(Tokens(ids(7, 130))), 12))
        assert hit.cached >= 112
        assert hit.output == alone[1].output
        await engine.probe()


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
async def test_layers_of_two_ranks_are_compared_with_the_models_own(family: str) -> None:
    found = {}
    for size in (1, 2):
        changes: dict[str, Any] = {"dtype": "bfloat16", "self_check": "full"}
        async with started(lifelike(tiny(family)), size, **changes) as engine:
            check = engine.card.self_check
        assert check is not None
        assert check.result == "passed"
        found[size] = check
    assert len(found[2].layers) == len(found[1].layers) > 0
    assert max(found[2].layers) < LAYER_BOUND
    assert found[2].distances.keys() == found[1].distances.keys()


@pytest.mark.thorough
async def test_a_layer_of_two_ranks_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = judgement._layers

    def layers(model: CausalModel, *given: Any) -> Any:
        middle: Any = model.decoder_layers[1]
        hook = middle.mlp.register_forward_hook(lambda _, __, found: found * 1.5)
        try:
            return usual(model, *given)
        finally:
            hook.remove()

    monkeypatch.setattr(judgement, "_layers", layers)
    changes: dict[str, Any] = {"dtype": "bfloat16", "self_check": "full"}
    engine = TorchEngine(settings(lifelike(tiny("llama")), **changes), Secret(bytes(32)))
    with pytest.raises(EngineError, match=r"together \(decoding\) by [^,]*, layer 1 by [^,]*$"):
        await engine.start()
    await engine.close()
    assert not multiprocessing.active_children()


@pytest.mark.thorough
async def test_drafts_images_and_bfloat16_are_divided_too() -> None:
    draft = '{"method": "ngram", "num_speculative_tokens": 4}'
    found = {}
    for size in (1, 2):
        async with started(tiny("llama", "bfloat16"), size) as engine:
            (found["bfloat16", size],) = await run(
                engine, make_request("one", Prompt.of(Tokens(ids(1, 70))), 8, logprobs=1)
            )
        async with started(tiny("qwen3"), size, speculative_config=draft) as engine:
            (found["draft", size],) = await run(
                engine, make_request("one", Prompt.of(Tokens([5, 6, 7, 8] * 12)), 40)
            )
        async with started(vision("qwen2_5_vl"), size) as engine:
            (found["images", size],) = await run(
                engine, make_request("one", prompt_of(engine, PARTS), 12, logprobs=5)
            )
    assert_same([found["draft", 2], found["images", 2]], [found["draft", 1], found["images", 1]])
    first = [found["bfloat16", size].deltas[0].logprobs[0].logprob for size in (2, 1)]
    assert first[0] == pytest.approx(first[1], abs=0.1)


@pytest.mark.slow
async def test_a_rank_that_dies_fails_the_engine_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process, no file by which ranks meet, and no connection between them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = connections()
    # Its processes are started, as outside of tests.
    with preloaded.started():
        killed = await _kill_a_rank(tmp_path)
    assert not psutil.pid_exists(killed)
    assert not meeting_places(tmp_path)
    assert connections() == before


def meeting_places(folder: Path) -> list[Path]:
    return list(folder.glob("inlay-ranks-*"))


def connections() -> set[Any]:
    """Of this process with others, and where it listens."""
    return {(each.laddr, each.raddr) for each in psutil.Process().net_connections("tcp")}


async def _kill_a_rank(folder: Path) -> int:
    before = connections()
    async with started(tiny("llama")) as engine:
        (child,) = multiprocessing.active_children()
        assert child.pid is not None
        assert len(meeting_places(folder)) == 1
        assert connections() > before
        request = make_request("one", Prompt.of(Tokens(ids(1, 20))), 480)
        receiver = Receiver(request)
        engine.submit(request, receiver)
        await receiver.begun()
        os.kill(child.pid, signal.SIGKILL)
        last = await receiver.ended()
        assert last.error is not None
        assert "the engine failed" in str((await asyncio.wait_for(engine.failed(), 60)).message)
    return child.pid


REFUSED = {
    "lora": ({"enable_lora": True}, "--enable-lora"),
    "sleep": ({"enable_sleep_mode": True}, "--enable-sleep-mode"),
    "kv": ({"enable_kv_fetch": True}, "--enable-kv-fetch"),
    "a head": (
        {"speculative_config": '{"method": "eagle3", "model": "x"}'},
        "a head that guesses tokens",
    ),
    "three": ({"tensor_parallel_size": 4}, "4 ranks do not divide 6 query heads"),
}


@pytest.mark.parametrize(("changes", "said"), REFUSED.values(), ids=REFUSED)
async def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str) -> None:
    engine = TorchEngine(settings(tiny("llama"), **changes), Secret(bytes(32)))
    with pytest.raises(InvalidRequestError, match=said) as caught:
        await engine.start()
    assert caught.value.param == "tensor_parallel_size"
    await engine.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("task", ["auto", "embed", "encode"])
def test_a_model_that_makes_vectors_is_not_divided(task: str) -> None:
    directory = vision("llava") if task == "encode" else tiny_embedding("bert")
    with pytest.raises(InvalidRequestError, match=r"the task (embed|encode) runs in one process"):
        check_settings(settings(directory, task=task), directory)


@pytest.mark.parametrize("family", ["gpt_oss", "phi3", "deepseek_v3", "int-quantized"])
async def test_layers_that_are_not_divided_are_named(family: str) -> None:
    directory = write(family)[0] if family == "int-quantized" else tiny(family)
    engine = TorchEngine(settings(directory), Secret(bytes(32)))
    with pytest.raises(InvalidRequestError, match=r"layers\.0\..* (not divided|quantised)"):
        await engine.start()
    await engine.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 5])
def test_a_batch_comes_as_it_was_sent(dtype: str, count: int) -> None:
    values = torch.randn(count, 8).to(getattr(torch, dtype))
    data = values.view(torch.uint8).numpy().tobytes()
    mixed = Rows(Buffer(data), dtype, (count, 8))
    items = [
        BatchItem([(0, Tokens([4, 5])), (2, mixed)], 0, 2 + count, [PageRun([1])], 1, adapter=2),
        BatchItem([(16, Tokens([7]))], 16, 1, [PageRun([2, 3])], 0, decoding=True, pending=True),
    ]
    for sent in (Batch.pack(items, 16), Batch.pack(items[1:], 16)):
        found = commands.decode(commands.encode(commands.Forward(sent)))
        assert isinstance(found, commands.Forward)
        for name, before, after in zip(Batch._fields, sent, found.batch, strict=True):
            if not isinstance(before, torch.Tensor):
                assert after == before, name
                continue
            assert isinstance(after, torch.Tensor)
            assert after.dtype == before.dtype, name
            assert after.shape == before.shape, name
            assert torch.equal(after, before), name


def test_ranks_run_on_the_cores_of_a_memory_node_each(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    for node, core in enumerate(cores[:2]):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{core}\n")
    found: list[tuple[int, set[int]]] = []

    def bound(rank: int, size: int) -> None:
        found.append((threads.bind(rank, size, tmp_path), os.sched_getaffinity(0)))

    for rank, size in ((0, 2), (1, 2), (0, 3)):
        # In a thread of its own, which alone is bound.
        thread = threading.Thread(target=bound, args=(rank, size))
        thread.start()
        thread.join()
    assert found == [(1, {cores[0]}), (1, {cores[1]}), (3, set(cores))]
