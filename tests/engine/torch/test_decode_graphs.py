"""Decoding by graphs, but for CUDA.

The same static memory, buckets and padding, with graphs that run their function, give what
`transformers.generate` gives in float32, exactly.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import _registry
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inlay.digest import Secret
from inlay.engine.settings import EngineSettings
from inlay.engine.torch import decode_graphs, model
from inlay.engine.torch.attention import choice as attention
from inlay.engine.torch.attention.varlen import Lengths, VarlenAttention, reads_pages
from inlay.engine.torch.batch import Batch, BatchItem
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.decode_graphs import DecodeGraphs, reason_unsupported, sizes
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.step import Core
from inlay.engine.torch.weights import linear
from inlay.engine.torch.weights.linear import FusedPart
from inlay.prompt import Prompt, Tokens
from inlay.request import Output, Request, Sampling
from tests.engine import reference
from tests.engine.torch.varlen import kernel_on_cpu
from tests.models import FAMILIES, VOCAB_SIZE, make, tiny

pytestmark = pytest.mark.usefixtures("overlap")

NOT_FLASH = {"gemma2", "deepseek_v2", "deepseek_v3"}
"""Families whose scores are capped, or whose keys and values differ in size."""

PROMPTS = {"a": (30, 33), "b": (1, 20), "c": (17, 5), "d": (45, 12), "e": (3, 1)}
"""Name to positions, and tokens to continue it by.

Works leave one after another, some beyond their windows.
"""

SECRET = Secret(bytes(32))


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No native kernels, torch's `varlen_attn` on a CPU, and float32 among what it does."""
    for module in (attention, linear, model):
        monkeypatch.setattr(module, "kernels", lambda: None)
    reads_pages.cache_clear()
    with kernel_on_cpu():
        yield
    reads_pages.cache_clear()


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "does", lambda *_: True)


@cache
def load(family: str, dtype: str = "float32") -> CausalModel:
    return CausalModel.load(
        EngineSettings(model=str(tiny(family, dtype)), device="cpu", num_threads=1)
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


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text", "phi", "gpt_oss"])
def test_graphs_decode_as_transformers_does_while_neighbours_come_and_go(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (
        family == "gpt_oss"
    ):  # torch says of grouped products in float32 that they do not exist, and computes them
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


@pytest.mark.usefixtures("in_float32")
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


@pytest.mark.usefixtures("in_float32")
def test_what_a_graph_says_does_not_depend_on_its_size_or_on_what_ran_before() -> None:
    loaded = load("qwen3")
    pages = loaded.new_pages(BOUNDS.num_pages + 1, 16)
    graphs = DecodeGraphs(loaded, pages, BOUNDS, Capturing())
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_captured_if_flash_attention_does_it(family: str) -> None:
    loaded = load(family, "bfloat16")
    reason = reason_unsupported(loaded, loaded.new_pages(4, 16), BOUNDS)
    assert (reason is not None) == (family in NOT_FLASH)
    assert reason in (None, "layer 0 asks for what flash attention does not do")


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


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NOT_FLASH])
def test_a_step_neither_looks_at_the_device_nor_copies_from_the_host(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "packs", lambda _: False)
    loaded = CausalModel.load(
        EngineSettings(model=str(tiny(family, "bfloat16")), device="cpu", num_threads=1)
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
    lengths = Lengths(torch.zeros(3, dtype=torch.int32, device=meta), own.int(), 1, 9)
    with torch.inference_mode(), _Hosted() as hosted:
        logits = loaded.logits(loaded.hidden(batch, pages, VarlenAttention(batch, pages, lengths)))
    assert logits.device == meta
    assert hosted.seen == []


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


@pytest.mark.usefixtures("in_float32")
def test_what_modules_keep_of_a_step_is_not_taken_from_the_rehearsal(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.5] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 96,
    }
    directory = make("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=96)
    settings = EngineSettings(model=str(directory), device="cpu", max_model_len=96, num_threads=1)
    loaded, capture = CausalModel.load(settings), Capturing()
    expected = run(Core(loaded, BOUNDS, SECRET), "ab")
    body: Any = loaded._model
    # Found at the first step, which is now the rehearsal.
    del body.model.rotary_emb.long_inv_freq
    assert run(Core(loaded, BOUNDS, SECRET, capture=capture), "ab") == expected
    assert type(body.model.rotary_emb.long_inv_freq) is Tensor
    assert capture.replayed


def test_there_are_graphs_for_powers_of_two_and_for_the_most_sequences() -> None:
    assert [sizes(most) for most in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_flash_attention_is_used_only_where_it_agrees(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for windowed in (False, True):
        for sunk in (False, True):
            assert reads_pages(
                torch.device("cpu"), torch.bfloat16, 64, 16, windowed=windowed, sunk=sunk
            )
    attend = VarlenAttention.attend
    monkeypatch.setattr(VarlenAttention, "attend", lambda *arguments: attend(*arguments) * 1.5)
    reads_pages.cache_clear()
    assert not reads_pages(torch.device("cpu"), torch.bfloat16, 64, 16, windowed=False, sunk=False)
    assert "as it is: results differ by" in caplog.text
    # What is not installed is not a reason to fail.
    assert "FA3: " in caplog.text


def test_a_kernel_beside_torch_is_activated_where_its_own_reads_no_pages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    active: list[str] = []

    class Handle:
        def remove(self) -> None:
            active.remove("FA")

    def register() -> Handle:
        active.append("FA")
        return Handle()

    attend = VarlenAttention.attend

    def only_when_active(*arguments: Any) -> Tensor:
        if not active:
            raise RuntimeError("paged keys and values are not supported")
        return attend(*arguments)

    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA", register)
    monkeypatch.setattr(VarlenAttention, "attend", only_when_active)
    try:
        assert reads_pages(torch.device("cpu"), torch.bfloat16, 64, 16, windowed=False, sunk=False)
        assert active == ["FA"]
    finally:
        _registry.restore_flash_attention_impl()
    assert active == []
