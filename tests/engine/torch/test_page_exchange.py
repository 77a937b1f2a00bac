"""Pages of one engine in another: output is that of an engine that computed everything.

A peer that lies, breaks off or has nothing changes no output, and leaves no page in use.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from inlay.base.address import Address
from inlay.base.errors import InlayError, InvalidRequestError, OverloadedError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.pages import copying
from inlay.engine.torch.pages.cached import CachedPages, FillResult, MissingPages, PageBatch
from inlay.engine.torch.pages.copying import PageSealer
from inlay.engine.torch.pages.price import WorkerPrice
from inlay.messages.card import Adapter
from inlay.messages.digest import BLOCK_DIGEST_SIZE, Secret
from inlay.messages.prompt import Buffer, Prompt, Tokens
from inlay.messages.request import PAGES, Output, PageQuery, Payload, Request, Source, Task
from tests import adapters
from tests.engine import reference
from tests.engine.conformance import SECRET, Receiver, ids, make_request, run
from tests.models import make, tiny

PEER = Address("127.0.0.1", 1, bytes(32))
OTHER = Address("127.0.0.1", 2, bytes(32))
FROM_PEER = (Source(PAGES, (PEER,)),)

Tamper = Callable[[int, list[Payload]], list[Payload]]


class Always(WorkerPrice):
    """Whatever it costs."""

    def is_worth(self, source: Address | str, positions: int, num_bytes: int) -> bool:
        return True

    def timeout_for(self, positions: int, deadline: float | None) -> float:
        return 60.0


class Brief(Always):
    """No patience."""

    def timeout_for(self, positions: int, deadline: float | None) -> float:
        return 0.05


class Direct:
    """`PeerWorkers` that reach engines of this process, and may spoil what they say."""

    def __init__(self, **engines: TorchEngine) -> None:
        self.engines = {PEER: engines.get("peer"), OTHER: engines.get("other")}
        self.asked: list[PageQuery] = []
        self.tamper: Tamper = lambda number, payloads: payloads

    async def payloads(
        self, address: Address, request: Request, within: float | None = None
    ) -> Sequence[Payload]:
        engine = self.engines[address]
        if engine is None:
            raise OverloadedError("it is not reached")
        assert isinstance(request.params, PageQuery)
        self.asked.append(request.params)
        number = len(self.asked)
        answer: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        try:
            engine.give_pages(request, answer.set_result)
            output = await answer
        finally:
            engine.abort(request.id)
        if output.error is not None:
            raise output.error.to_error()
        return self.tamper(number, list(output.payloads))


def settings(directory: Path, **changes: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "model": str(directory),
        "device": "cpu",
        "num_threads": 1,
        "block_size": 16,
        "kv_cache_memory_bytes": 8 << 20,
        "max_num_batched_tokens": 64,
        "enable_kv_fetch": True,
    }
    return EngineSettings.of(**(values | changes))


@asynccontextmanager
async def started(
    *configs: EngineSettings, secret: Secret = SECRET
) -> AsyncIterator[list[TorchEngine]]:
    engines = [TorchEngine(config, secret) for config in configs]
    try:
        for engine in engines:
            await engine.start()
            if engine._exchange is not None:
                engine._exchange.price = Always()
        yield engines
    finally:
        for engine in engines:
            await engine.close()


@asynccontextmanager
async def pair(directory: Path, **changes: Any) -> AsyncIterator[tuple[Direct, TorchEngine]]:
    """An engine that has computed, and one that asks it."""
    config = settings(directory, **changes)
    async with started(config, config) as (giving, asking):
        direct = Direct(peer=giving)
        asking.use_peers(direct)
        yield direct, asking


async def answers(engine: TorchEngine, request: Request) -> tuple[list[int], int]:
    """Output and cached positions; then no page is in use."""
    (receiver,) = await run(engine, request)
    assert receiver.last.finish_reason == "length"
    assert engine.stats().blocks_used == 0
    return receiver.output, receiver.cached


def one_page_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PIECE_BYTES", 1)
    monkeypatch.setattr(copying, "QUESTION_BYTES", 1)


STATES = {"qwen3_next": "float32", "qwen3_5_text": "bfloat16", "qwen3_5_moe_text": "float32"}
"""Models with recurrent layers."""

WINDOWED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "model",
    ["llama", "qwen3", "all windows", "windows among full", "latent", "bfloat16", *STATES],
)
async def test_what_was_computed_elsewhere_gives_the_same_output(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = {
        "all windows": lambda: tiny("mistral"),
        "windows among full": lambda: make("qwen3", tmp_path, **WINDOWED),
        "latent": lambda: tiny("deepseek_v3"),
        "bfloat16": lambda: tiny("llama", "bfloat16"),
    }.get(model, lambda: tiny(model, STATES.get(model, "float32")))()
    tokens = ids(1, 150)
    prompts = {"text": Prompt.of(Tokens(tokens))}
    if model not in ("bfloat16", "qwen3_5_text"):
        table = reference.rows_of(reference.look_up(directory, tokens[30:90]))
        size = reference.look_up(directory, [3]).shape[1]
        noise = 0.5 * torch.randn(40, size, generator=torch.Generator().manual_seed(4))
        prompts["mixed"] = Prompt.of(Tokens(tokens[:30]), table, Tokens(tokens[90:]))
        prompts["rows"] = Prompt.of(reference.rows_of(noise), Tokens(ids(2, 70)))
    one_page_at_a_time(monkeypatch)
    async with pair(directory) as (direct, asking):
        giving = direct.engines[PEER]
        assert giving is not None
        for name, prompt in prompts.items():
            truth, _ = await answers(giving, make_request(name, prompt, salt=name))
            direct.asked.clear()
            found = await answers(asking, make_request(name, prompt, salt=name, sources=FROM_PEER))
            assert found == (truth, (len(prompt) - 1) // 16 * 16), name
            assert direct.asked
            # All is here now: nobody is asked.
            direct.asked.clear()
            again = make_request(name, prompt, salt=name, sources=FROM_PEER)
            assert await answers(asking, again) == found
            assert not direct.asked
        assert giving.stats().blocks_used == asking.stats().blocks_used == 0


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["llama", "qwen3_next"])
async def test_pages_of_an_output_too_let_another_go_on(model: str) -> None:
    prompt = Prompt.of(Tokens(ids(1, 40)))
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3}
    async with pair(tiny(model)) as (direct, asking):
        giving = direct.engines[PEER]
        assert giving is not None
        truth, _ = await answers(giving, make_request("one", prompt, 80, **options))
        rest = make_request(
            "one", prompt, 80, prior_output=tuple(truth[:60]), sources=FROM_PEER, **options
        )
        (receiver,) = await run(asking, rest)
        assert receiver.output == truth[60:]
        assert direct.asked
        states = 3 * (model != "llama")
        assert asking.stats().kv_pages_fetched == (40 + 60 - 1) // 16 + states


async def test_pages_are_of_one_adapter_salt_and_secret(tmp_path: Path) -> None:
    directory, prompt = tiny("llama"), Prompt.of(Tokens(ids(1, 100)))
    paths = [
        adapters.make_lora(tmp_path / name, directory, seed=seed)
        for seed, name in enumerate(("first", "second"), 1)
    ]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    async with pair(directory, **lora) as (direct, asking):
        giving = direct.engines[PEER]
        assert giving is not None
        for engine in (giving, asking):
            for name, path in zip("ab", paths, strict=True):
                await engine.load_adapter(
                    Adapter(name=name, content_id=name * 32, path=str(path)), str(path)
                )
        truth = {}
        for adapter in (None, "a", "b"):
            truth[adapter] = (
                await answers(
                    asking, make_request(f"alone{adapter}", prompt, adapter=adapter, salt="alone")
                )
            )[0]
        assert len(set(map(tuple, truth.values()))) == 3
        await answers(giving, make_request("computed", prompt, adapter="a", salt="one"))
        for adapter, salt, cached in (
            (None, "one", 0), ("b", "one", 0), ("a", "two", 0), ("a", None, 0), ("a", "one", 96),
        ):  # fmt: skip
            asked = make_request("asks", prompt, adapter=adapter, salt=salt, sources=FROM_PEER)
            assert await answers(asking, asked) == (truth[adapter], cached)
        async with started(settings(directory, **lora), secret=Secret(bytes(32))) as (stranger,):
            stranger.use_peers(direct)
            await answers(giving, make_request("computed", prompt))
            asked = make_request("asks", prompt, sources=FROM_PEER)
            assert await answers(stranger, asked) == (truth[None], 0)


def _flipped(payload: Payload, place: int) -> Payload:
    data = bytearray(payload.data.view)
    data[place] ^= 1
    return replace(payload, data=Buffer(data))


def _filled(payload: Payload, value: float) -> Payload:
    data = torch.frombuffer(bytearray(payload.data.view), dtype=torch.uint8)
    data.view(payload.shape)[:, copying.HEADER_SIZE :].view(torch.float32)[0, -3] = value
    return replace(payload, data=Buffer(data.numpy().data))


LIES: dict[str, Callable[[list[Payload]], list[Payload]]] = {
    "a flipped bit of a name": lambda found: [_flipped(found[0], 1)],
    "a flipped bit of a checksum": lambda found: [_flipped(found[0], 17)],
    "a flipped bit of a value": lambda found: [_flipped(found[0], 100)],
    "a short piece": lambda found: [replace(found[0], data=found[0].data.slice(0, 100))],
    "an extra piece": lambda found: [*found, *found],
    "more pages than asked for": lambda found: [
        replace(found[0], shape=(2, found[0].shape[1]), data=Buffer(bytes(found[0].data.view) * 2))
    ],
    "nothing": lambda found: [],
    "another type": lambda found: [replace(found[0], dtype="float32")],
    "a page of another size": lambda found: [replace(found[0], shape=(1, found[0].shape[1] + 4))],
    "not a number": lambda found: [_filled(found[0], float("nan"))],
}


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["llama", "qwen3_5_text"])
async def test_a_peer_that_lies_or_breaks_off_anywhere_changes_nothing(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_page_at_a_time(monkeypatch)
    prompt = Prompt.of(Tokens(ids(1, 100)))
    async with pair(tiny(model)) as (direct, asking):
        giving = direct.engines[PEER]
        assert giving is not None
        truth, _ = await answers(giving, make_request("truth", prompt))

        async def asked(tamper: Tamper) -> int:
            """Cached positions of a request whose pages come so."""
            direct.asked.clear()
            direct.tamper = tamper
            assert await asking.reset_prefix_cache() >= 0
            output, cached = await answers(asking, make_request("one", prompt, sources=FROM_PEER))
            assert output == truth
            return cached

        assert await asked(lambda number, found: found) == 96
        whole = len(direct.asked)
        # A state at the end for each of three groups, without which keys and values are of no use.
        states = 3 * (model != "llama")
        assert whole == 6 + states

        def cut(after: int, number: int, found: list[Payload]) -> list[Payload]:
            if number > after:
                raise OverloadedError("the connection was cut")
            return found

        for after in range(whole):
            # What came before the cut is of use.
            cached = await asked(lambda number, found, k=after: cut(k, number, found))  # type: ignore[misc]
            assert cached == (0 if states else after * 16)
        for name, lie in LIES.items():
            for at in (1, 4, whole):
                cached = await asked(
                    lambda number, found, lie=lie, at=at: lie(found) if number == at else found  # type: ignore[misc]
                )
                assert cached == (0 if states else (at - 1) * 16), name


async def test_a_prefix_ends_at_a_page_whose_states_came(monkeypatch: pytest.MonkeyPatch) -> None:
    one_page_at_a_time(monkeypatch)
    prompt = Prompt.of(Tokens(ids(1, 100)))
    async with pair(tiny("qwen3_5_text")) as (direct, asking):
        giving = direct.engines[PEER]
        assert giving is not None
        truth, _ = await answers(giving, make_request("truth", prompt))
        lacking: list[bytes] = []

        def evicted(number: int, found: list[Payload]) -> list[Payload]:
            """The states of one group are gone at the last two ends of pages."""
            query = direct.asked[number - 1]
            if query.group != 2 or len(lacking) == 2:
                return found
            lacking.append(query.digests)
            return [replace(found[0], shape=(0, found[0].shape[1]), data=Buffer(b""))]

        direct.tamper = evicted
        assert await answers(asking, make_request("one", prompt, sources=FROM_PEER)) == (truth, 48)


async def test_a_question_brings_several_pages_of_which_a_few_are_copied_between_two_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copying, "PIECE_BYTES", 1)
    prompt = Prompt.of(Tokens(ids(1, 100)))
    copied: list[tuple[str, int]] = []
    read, fill = CachedPages.read, CachedPages.fill

    def reads(
        pages: CachedPages, sealer: PageSealer, group: int, digests: Sequence[bytes], records: Any
    ) -> int:
        count = read(pages, sealer, group, digests, records)
        copied.append(("read", count))
        return count

    def fills(
        pages: CachedPages, sealer: PageSealer, lack: MissingPages, piece: PageBatch, records: Any
    ) -> FillResult | None:
        filled = fill(pages, sealer, lack, piece, records)
        assert filled is not None
        copied.append(("filled", filled.pages))
        return filled

    monkeypatch.setattr(CachedPages, "read", reads)
    monkeypatch.setattr(CachedPages, "fill", fills)
    async with pair(tiny("llama")) as (direct, asking):
        giving = direct.engines[PEER]
        assert giving is not None
        truth, _ = await answers(giving, make_request("truth", prompt))
        request = make_request("one", prompt, sources=FROM_PEER)
        assert await answers(asking, request) == (truth, 96)
        assert [len(query.digests) for query in direct.asked] == [6 * BLOCK_DIGEST_SIZE]
        # Nobody waits where nothing runs.
        assert copied == [("read", 6), ("filled", 6)]
        copied.clear()
        await asking.reset_prefix_cache()
        other = make_request("other", Prompt.of(Tokens(ids(2, 20))), 200)
        receivers = [Receiver(other) for _ in (giving, asking)]
        for engine, receiver in zip((giving, asking), receivers, strict=True):
            engine.submit(other, receiver)
        (receiver,) = await run(asking, request)
        assert (receiver.output, receiver.cached) == (truth, 96)
        for receiver in receivers:
            await receiver.ended()
        assert copied == [("read", 1)] * 6 + [("filled", 1)] * 6
        await asking.reset_prefix_cache()
        await giving.reset_prefix_cache()
        await answers(giving, make_request("truth", prompt))
        # What is good before a damaged page is of use.
        for page in range(6):
            width = asking._exchange._sealer.shape.record_bytes(0)  # type: ignore[union-attr]
            direct.tamper = lambda _, found, at=page * width + 99: [_flipped(found[0], at)]  # type: ignore[misc]
            await asking.reset_prefix_cache()
            assert await answers(asking, request) == (truth, page * 16)
        # So is what is there before a page that the peer has not.
        direct.tamper = lambda number, found: found
        await asking.reset_prefix_cache()
        longer = make_request("longer", Prompt.of(Tokens(ids(1, 130))), sources=FROM_PEER)
        assert (await answers(asking, longer))[1] == 96
        assert asking.stats().kv_pages_fetched == 12 + sum(range(6)) + 6


class Evicting(Direct):
    """A peer that drops its cache after some answers, while it is asked for more."""

    def __init__(self, peer: TorchEngine, after: int) -> None:
        super().__init__(peer=peer)
        self._peer = peer
        self._left = after

    async def payloads(
        self, address: Address, request: Request, within: float | None = None
    ) -> Sequence[Payload]:
        found = await super().payloads(address, request, within)
        self._left -= 1
        if self._left == 0:
            await self._peer.reset_prefix_cache()
        return found


async def test_two_that_ask_while_the_pages_are_evicted_compute_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_page_at_a_time(monkeypatch)
    prompt = Prompt.of(Tokens(ids(1, 240)))
    config = settings(tiny("llama"))
    async with started(config, config, config) as (giving, *both):
        truth, _ = await answers(giving, make_request("truth", prompt))
        # Of each asker two questions are under way at a time: pages are left to evict.
        evicting = Evicting(giving, after=3)
        for engine in both:
            engine.use_peers(evicting)
        found = await asyncio.gather(
            *(
                answers(engine, make_request(name, prompt, sources=FROM_PEER))
                for name, engine in zip("ab", both, strict=True)
            )
        )
        assert [output for output, _ in found] == [truth, truth]
        pages = [engine.stats().kv_pages_fetched for engine in both]
        assert 1 <= sum(pages) < 2 * (239 // 16)
        assert giving.stats().blocks_used == 0


async def test_the_next_peer_is_asked_where_one_has_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = Prompt.of(Tokens(ids(1, 100)))
    config = settings(tiny("llama"))
    async with started(config, config, config) as (full, empty, asking):
        asking.use_peers(Direct(peer=empty, other=full))
        truth, _ = await answers(full, make_request("truth", prompt))
        both = (Source(PAGES, (PEER, OTHER)),)
        assert await answers(asking, make_request("one", prompt, sources=both)) == (truth, 96)


async def test_requests_of_one_prompt_fetch_it_once() -> None:
    prompt = Prompt.of(Tokens(ids(1, 100)))
    async with pair(tiny("llama")) as (direct, asking):
        giving = direct.engines[PEER]
        assert giving is not None
        truth, _ = await answers(giving, make_request("truth", prompt))
        some = [make_request(str(n), prompt, sources=FROM_PEER) for n in range(4)]
        for receiver in await run(asking, *some):
            assert receiver.output == truth
        assert len(direct.asked) == 1


async def test_what_running_sequences_need_is_not_taken() -> None:
    # 16 pages of 16 positions, of which a sequence will need 13.
    prompt, long = Prompt.of(Tokens(ids(1, 100))), Prompt.of(Tokens(ids(2, 20)))
    async with started(settings(tiny("llama"))) as (giving,):
        page = copying.HEADER_SIZE
        assert giving._model is not None
        page = giving._model.page_bytes(16)
        small = settings(tiny("llama"), kv_cache_memory_bytes=16 * page, max_model_len=240)
        async with started(small) as (asking,):
            asking.use_peers(Direct(peer=giving))
            truth, _ = await answers(giving, make_request("truth", prompt))
            alone, _ = await answers(giving, make_request("alone", long, 180))
            receivers = await run(
                asking,
                make_request("long", long, 180),
                make_request("asks", prompt, sources=FROM_PEER),
            )
            assert [receiver.output for receiver in receivers] == [alone, truth]
            assert asking.stats().blocks_used == 0


async def test_a_request_may_be_aborted_and_an_engine_closed_while_pages_are_asked_for() -> None:
    prompt = Prompt.of(Tokens(ids(1, 100)))
    async with pair(tiny("llama")) as (direct, asking):
        held = asyncio.Event()

        async def never(*_: Any, **__: Any) -> Sequence[Payload]:
            held.set()
            return await asyncio.Event().wait()  # type: ignore[return-value]

        direct.payloads = never  # type: ignore[method-assign]
        receivers = [
            Receiver(make_request(name, prompt, sources=FROM_PEER))
            for name in ("aborted", "closed")
        ]
        for receiver in receivers:
            held.clear()
            asking.submit(receiver.request, receiver)
            await held.wait()
            if receiver is receivers[0]:
                asking.abort("aborted")
                assert "aborted" not in asking._needs
                await receiver.ended()
        await asking.close()
        assert [receiver.last.finish_reason for receiver in receivers] == ["abort", "abort"]


async def test_a_peer_that_says_nothing_is_not_waited_for_longer_than_agreed() -> None:
    prompt = Prompt.of(Tokens(ids(1, 100)))
    async with pair(tiny("llama")) as (direct, asking):
        giving = direct.engines[PEER]
        assert giving is not None

        async def never(*_: Any, **__: Any) -> Sequence[Payload]:
            return await asyncio.Event().wait()  # type: ignore[return-value]

        direct.payloads = never  # type: ignore[method-assign]
        truth, _ = await answers(giving, make_request("truth", prompt))
        exchange = asking._exchange
        assert exchange is not None
        exchange.price = Brief()
        assert await answers(asking, make_request("one", prompt, sources=FROM_PEER)) == (truth, 0)


@pytest.mark.parametrize(
    ("query", "error"),
    [
        (PageQuery("another", 0, bytes(16)), "another layout"),
        (PageQuery("", 1, bytes(16)), "page group 1"),
        (PageQuery("", 0, b""), "digests of 0 bytes"),
        (PageQuery("", 0, bytes(17)), "digests of 17 bytes"),
        (PageQuery("", 0, bytes(16 << 20)), "digests of 16777216 bytes"),
    ],
)
async def test_a_question_that_makes_no_sense_is_refused(query: PageQuery, error: str) -> None:
    async with started(settings(tiny("llama"))) as (giving,):
        layout = query.layout or giving.card.kv_layout
        asked = Request(
            id="q",
            task=Task.PAGES,
            prompts=(),
            params=PageQuery(layout, query.group, query.digests),
        )
        with pytest.raises(InvalidRequestError, match=error):
            giving.give_pages(asked, lambda output: None)


async def test_an_engine_gives_nothing_unless_it_is_told_to() -> None:
    async with started(settings(tiny("llama"), enable_kv_fetch=False)) as (engine,):
        assert engine.card.kv_layout == ""
        asked = Request(id="q", task=Task.PAGES, prompts=(), params=PageQuery("", 0, bytes(16)))
        with pytest.raises(InlayError, match="--enable-kv-fetch"):
            engine.give_pages(asked, lambda output: None)


async def test_a_layout_names_all_that_decides_what_a_page_means() -> None:
    shapes = []
    for family, size, dtype in (
        ("llama", 16, "float32"), ("llama", 32, "float32"), ("llama", 16, "bfloat16"),
        ("qwen3", 16, "float32"), ("mistral", 16, "float32"),
    ):  # fmt: skip
        async with started(settings(tiny(family), block_size=size, dtype=dtype)) as (engine,):
            shapes.append(engine.card.kv_layout)
    assert len(set(shapes)) == len(shapes)


def test_pages_are_fetched_where_that_takes_less_time_than_computing_them() -> None:
    now = 0.0
    price = WorkerPrice(lambda: now)
    # Nothing is known: it is tried, for so long.
    assert price.is_worth(PEER, 1000, 10**12)
    assert (price.timeout_for(1000, None), price.timeout_for(1000, 3.0)) == (10.0, 1.5)
    price.computed(8, 1.0)  # Decoding says nothing about prompts.
    price.computed(1000, 2.0)
    assert (price.timeout_for(1000, None), price.timeout_for(10, None)) == (2.0, 0.5)
    assert price.timeout_for(10**6, None) == 10.0
    # 100 MB/s, and 500 positions/s: worth it below 200 kB for each position.
    price.fetched(PEER, 100_000_000, 1.0)
    assert price.is_worth(PEER, 1000, 1000 * 199_000)
    assert not price.is_worth(PEER, 1000, 1000 * 201_000)
    assert price.is_worth(OTHER, 1000, 1000 * 201_000)
    now = 60.0
    assert price.is_worth(PEER, 1000, 1000 * 201_000)
