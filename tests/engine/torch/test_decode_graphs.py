"""Decoding by graphs, but for CUDA.

The same static memory, buckets and padding, with graphs that run their function, give what
`transformers.generate` gives in float32, exactly.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inlay.base.errors import EngineError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch import decode_graphs, model
from inlay.engine.torch.attention import choice
from inlay.engine.torch.attention.cuda import Sequences
from inlay.engine.torch.batch import Batch, BatchItem
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.cache_events import CacheEventQueue
from inlay.engine.torch.decode_graphs import DecodeGraphs, reason_unsupported, sizes
from inlay.engine.torch.loading import core_of
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.step import Core
from inlay.engine.torch.weights import linear
from inlay.engine.torch.weights.linear import FusedPart
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Output, Request, Sampling
from tests.engine import reference
from tests.engine.torch import cuda_kernel
from tests.models import FAMILIES, VOCAB_SIZE, make, tiny

overlapping = pytest.mark.usefixtures("overlap")
"""Of tests that run a core's steps."""

PROMPTS = {"a": (30, 33), "b": (1, 20), "c": (17, 5), "d": (45, 12), "e": (3, 1)}
"""Name to positions, and tokens to continue it by.

Works leave one after another, some beyond their windows.
"""

SECRET = Secret(bytes(32))


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for CUDA, in plain torch, in place of native ones."""
    for module in (choice, linear, model):
        monkeypatch.setattr(module, "kernels", lambda: None)
    for module in (choice, model):
        monkeypatch.setattr(module, "kernels_on", lambda _: cuda_kernel.KERNELS)
    monkeypatch.setattr(decode_graphs, "cuda_kernels", lambda: cuda_kernel.KERNELS)


@cache
def load(family: str, dtype: str = "float32") -> CausalModel:
    return CausalModel.load(
        EngineSettings.of(model=str(tiny(family, dtype)), device="cpu", num_threads=1)
    )


BOUNDS = EngineLimits(
    max_model_len=96, max_num_seqs=5, max_num_batched_tokens=32, page_size=16, num_pages=40
)


class Capturing:
    """Graphs that run their function; counts which ran."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed: list[int] = []

    def __call__(self, function: Callable[[], None], /) -> Callable[[], None]:
        number = self.captured
        self.captured += 1

        def replay() -> None:
            self.replayed.append(number)
            function()

        return replay


def prompt(name: str) -> Prompt:
    generator = torch.Generator().manual_seed(ord(name))
    return Prompt.of(
        Tokens(torch.randint(3, VOCAB_SIZE, (PROMPTS[name][0],), generator=generator).tolist())
    )


def run(engine: Core, names: Sequence[str]) -> dict[str, list[int]]:
    """Continue prompts, of which each joins two steps after the last."""
    outputs: list[Output] = []
    waiting = list(names)
    for step in range(200):
        if waiting and step % 2 == 0:
            name = waiting.pop(0)
            sampling = Sampling(max_tokens=PROMPTS[name][1], temperature=0.0, ignore_eos=True)
            engine.admit(Request(id=name, prompts=(prompt(name),), params=sampling))
        outputs += engine.step()
    assert not len(engine)
    return {
        name: [id_ for output in outputs if output.request_id == name for id_ in output.token_ids]
        for name in names
    }


@overlapping
@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "phi", "gpt_oss", "deepseek_v3"],
)
def test_graphs_decode_as_transformers_does_while_neighbours_come_and_go(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family in ("gpt_oss", "deepseek_v3"):
        # torch says of grouped products in float32 that they do not exist, and computes them.
        monkeypatch.setattr(decode_graphs, "reason_unsupported", lambda *_: None)
    capture = Capturing()
    engine = Core(load(family), BOUNDS, SECRET, capture=capture)
    for tensor in (*engine.pages.keys, *engine.pages.values):
        tensor[:, 1 : engine.pages.num_pages] = torch.nan
    found = run(engine, "abcde")
    assert found == {
        name: reference.greedy(tiny(family), prompt(name), tokens)
        for name, (_, tokens) in PROMPTS.items()
    }
    assert capture.captured == 4
    assert set(capture.replayed) >= {1, 2, 3}
    for tensor in (*engine.pages.keys, *engine.pages.values):
        assert not tensor[:, 0].any()
        assert tensor[:, -1].isfinite().all()


def test_a_step_that_no_graph_holds_is_computed_as_ever() -> None:
    capture = Capturing()
    engine = Core(load("llama"), BOUNDS, SECRET, capture=capture)
    graphs = engine.graphs
    assert graphs is not None
    rows = reference.rows_of(reference.look_up(tiny("llama"), [5]))

    def fits(*stretches: BatchItem) -> bool:
        return graphs.fits(Batch.pack(stretches, 16))

    token, page = [(0, Tokens([5]))], [PageRun([1])]
    one = BatchItem(token, 0, 1, page, True)
    assert fits(one)
    assert fits(*[one] * 5)
    assert not fits(*[one] * 6)
    assert not fits(one, BatchItem(token, 0, 1, page, False))
    assert not fits(one, BatchItem([(0, Tokens([5, 6]))], 0, 2, page, True))
    assert not fits(BatchItem([(0, rows)], 0, 1, page, True))


def test_what_a_graph_says_does_not_depend_on_its_size_or_on_what_ran_before() -> None:
    loaded = load("qwen3")
    pages = loaded.new_pages(BOUNDS.num_pages + 1, 16)
    graphs = DecodeGraphs(loaded, pages, BOUNDS, Capturing(), cuda_kernel.KERNELS)
    runs = [PageRun([number]) for number in range(1, 6)]

    def batch(*spans: tuple[int, int]) -> Batch:
        return Batch.pack(
            [BatchItem([(0, Tokens([id_]))], 0, 1, [runs[at]], True) for at, id_ in spans], 16
        )

    alone = [tensor.clone() for tensor in graphs.run(batch((0, 7)))]
    hidden, logits = graphs.run(batch((3, 9), (0, 7), (1, 11)))
    for found, expected in ((hidden[1:2], alone[0]), (logits[1:2], alone[1])):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        graphs.run(batch((3, 9), (0, 7), (1, 11)))[1],
        loaded.forward(batch((3, 9), (0, 7), (1, 11)), pages),
    )


class Dropping:
    """A capture that keeps nothing of its function but whether it is still there, as CUDA does."""

    def __init__(self) -> None:
        self.functions: list[weakref.ref[Callable[[], None]]] = []

    def __call__(self, function: Callable[[], None], /) -> Callable[[], None]:
        self.functions.append(weakref.ref(function))
        return lambda: None


def test_all_that_a_graph_reads_lives_as_long_as_it() -> None:
    capture = Dropping()
    loaded = load("llama")
    graphs = DecodeGraphs(loaded, loaded.new_pages(4, 16), BOUNDS, capture, cuda_kernel.KERNELS)
    gc.collect()
    assert all(function() is not None for function in capture.functions)
    del graphs
    gc.collect()
    assert all(function() is None for function in capture.functions)


def test_only_the_columns_of_block_tables_in_use_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded, copied = load("llama"), list[int]()
    graphs = DecodeGraphs(
        loaded, loaded.new_pages(41, 16), BOUNDS, Capturing(), cuda_kernel.KERNELS
    )
    fill = decode_graphs._GraphInputs.fill

    def noted(inputs: decode_graphs._GraphInputs, host: decode_graphs._GraphInputs) -> None:
        copied.append(host.block_table.shape[2])
        fill(inputs, host)

    monkeypatch.setattr(decode_graphs._GraphInputs, "fill", noted)
    long, short = PageRun([1, 2, 3]), PageRun([4])
    one = BatchItem([(40, Tokens([7]))], 40, 1, [long], True)
    other = BatchItem([(0, Tokens([7]))], 0, 1, [short], True)
    pages = loaded.new_pages(41, 16)
    for tensors in (*graphs._pages.kept, *pages.kept):
        for tensor in tensors:
            tensor.zero_()
    first = graphs.run(Batch.pack([one], 16))[1].clone()
    # Columns of the long sequence are still there, and are not read.
    found = graphs.run(Batch.pack([other], 16))[1].clone()
    assert copied == [3, 1]
    assert first.isfinite().all()
    torch.testing.assert_close(
        found, loaded.forward(Batch.pack([other], 16), pages), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_captured(family: str) -> None:
    loaded = load(family, "bfloat16")
    assert reason_unsupported(loaded, loaded.new_pages(4, 16), BOUNDS) is None


class _Hosted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that take or give a tensor on the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, found))
        if any(isinstance(leaf, Tensor) and leaf.device.type == "cpu" for leaf in leaves):
            self.seen.append(str(func))
        return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_neither_looks_at_the_device_nor_copies_from_the_host(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "packs", lambda _: False)
    loaded = CausalModel.load(
        EngineSettings.of(model=str(tiny(family, "bfloat16")), device="cpu", num_threads=1)
    )
    body: Any = loaded._model
    for module in body.modules():
        if isinstance(module, FusedPart):
            module.whole.to("meta")
    body.to("meta")
    loaded.device = meta = torch.device("meta")
    pages = loaded.new_pages(4, 16)
    own = torch.zeros(2, dtype=torch.int64, device=meta)
    slots = own.expand(len(loaded.page_groups), 2).contiguous()
    batch = Batch(
        own, own[:0], own[:0], own, slots, own, own[:0], slots[..., None].int(), (1, 1), (9, 9)
    )
    starts = torch.zeros(3, dtype=torch.int32, device=meta)
    sequences = Sequences(starts, own.int(), 2, single=True, several=False)
    paged = choice.with_kernels(batch, pages, decode_graphs._SILENT, sequences)
    with torch.inference_mode(), _Hosted() as hosted:
        logits = loaded.logits(loaded.hidden(batch, pages, paged))
    assert logits.device == meta
    assert hosted.seen == []


@overlapping
def test_a_model_that_looks_at_its_data_is_served_without_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded, capture = load("mixtral", "bfloat16"), Capturing()
    body: Any = loaded._model
    monkeypatch.setattr(body.config, "_experts_implementation", "eager")
    engine = Core(loaded, BOUNDS, SECRET, capture=capture)
    assert engine.graphs is None
    assert capture.captured == 0
    assert "decoding runs without graphs: " in caplog.text
    assert len(run(engine, "b")["b"]) == PROMPTS["b"][1]


@overlapping
def test_what_modules_keep_of_a_step_is_not_taken_from_the_rehearsal(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.5] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 96,
    }
    directory = make("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=96)
    settings = EngineSettings.of(
        model=str(directory), device="cpu", max_model_len=96, num_threads=1
    )
    loaded, capture = CausalModel.load(settings), Capturing()
    expected = run(Core(loaded, BOUNDS, SECRET), "ab")
    body: Any = loaded._model
    # Found at the first step, which is now the rehearsal.
    del body.model.rotary_emb.long_inv_freq
    assert run(Core(loaded, BOUNDS, SECRET, capture=capture), "ab") == expected
    assert type(body.model.rotary_emb.long_inv_freq) is Tensor
    assert capture.replayed


def test_there_are_graphs_for_few_sequences_for_every_eight_and_for_the_most() -> None:
    assert [sizes(most) for most in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]
    assert sizes(30) == [1, 2, 4, 8, 16, 24, 30]


def test_without_triton_decoding_runs_without_graphs_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(decode_graphs, "cuda_kernels", choice.cuda_kernels.__wrapped__)
    assert Core(load("llama"), BOUNDS, SECRET, capture=Capturing()).graphs is None
    assert "Triton, which comes with torch's packages for CUDA" in caplog.text


def _stale_tables(usual: Any) -> Any:
    def fill(self: Any, host: Any) -> None:
        usual(self, host._replace(block_table=host.block_table[..., :0]))

    return fill


def _next_position(usual: Any) -> Any:
    def fill(self: Any, host: Any) -> None:
        usual(self, host)
        self.positions.add_(1)

    return fill


def _without_last_key(usual: Any) -> Any:
    def fill(self: Any, host: Any) -> None:
        usual(self, host)
        self.contexts.sub_(1).clamp_(min=1)

    return fill


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("fault", [_stale_tables, _next_position, _without_last_key])
def test_graphs_that_differ_from_launched_steps_are_not_used(
    family: str,
    fault: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = load(family, "bfloat16")
    check = own.self_check
    assert check is not None
    monkeypatch.setattr(own, "self_check", check)
    right = Core(own, BOUNDS, SECRET, capture=Capturing())
    assert right.graphs is not None
    assert own.self_check is check
    inputs = decode_graphs._GraphInputs
    monkeypatch.setattr(inputs, "fill", fault(inputs.fill))
    assert Core(own, BOUNDS, SECRET, capture=Capturing()).graphs is None
    assert "decoding runs without graphs: their logits differ by" in caplog.text
    assert own.self_check.left_out == (*check.left_out, "decode graphs")
    monkeypatch.setattr(own, "self_check", None)
    assert Core(own, BOUNDS, SECRET, capture=Capturing()).graphs is not None


def test_graphs_that_differ_end_a_strict_start(monkeypatch: pytest.MonkeyPatch) -> None:
    own = load("llama", "bfloat16")
    assert own.self_check is not None
    given = EngineSettings.of(model=own.path, self_check="strict", kv_cache_memory_bytes=1 << 20)
    core_of(given, own, SECRET, CacheEventQueue(given, SECRET))
    differing = replace(own.self_check, left_out=(decode_graphs.GRAPHS,))
    monkeypatch.setattr(own, "self_check", differing)
    with pytest.raises(EngineError, match="strict: decoding by CUDA graphs differs"):
        core_of(given, own, SECRET, CacheEventQueue(given, SECRET))
