"""Adapters come and go under load: one state machine, whatever fails."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

from inlay.adapter.library import AdapterLibrary
from inlay.base.errors import EngineError, InvalidRequestError, NotFoundError
from inlay.engine.settings import EngineSettings
from inlay.messages.card import ModelCard
from inlay.messages.commands import ListAdapters, LoadAdapter, UnloadAdapter
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Rows, Tokens
from inlay.messages.request import Output, Request, Sampling, Task
from inlay.worker.adapters import AdapterRegistry
from inlay.worker.host import EngineHost, host_of
from inlay.worker.lora_modules import check_adapters, parse_modules
from inlay.worker.supervisor import restoring
from inlay_stages.cards import AudioCard
from tests.worker.echoing import AdaptingEcho

SECRET = Secret(bytes(32))
HIDDEN = 8


def write_lora(directory: Path, seed: int = 1, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file(
        {
            f"{name}.lora_A.weight": random.standard_normal((2, HIDDEN), dtype=np.float32),
            f"{name}.lora_B.weight": random.standard_normal((HIDDEN, 2), dtype=np.float32),
        },
        directory / "adapter_model.safetensors",
    )
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **config}
    (directory / "adapter_config.json").write_text(json.dumps(said))
    return directory


def write_prompt(directory: Path, seed: int = 1, count: int = 3, hidden: int = HIDDEN) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    rows = np.random.default_rng(seed).standard_normal((count, hidden), dtype=np.float32)
    save_file({"prompt_embeddings": rows}, directory / "adapter_model.safetensors")
    said = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": count, "token_dim": hidden}
    (directory / "adapter_config.json").write_text(json.dumps(said))
    return directory


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 99, "hidden_size": HIDDEN, "max_position_embeddings": 100_000})
    )
    return EngineSettings.of(
        model=str(tmp_path), engine="echo", served_model_name=["m", "alias"], max_cpu_loras=3
    )


@pytest.fixture
async def engine(settings: EngineSettings) -> AsyncIterator[AdaptingEcho]:
    engine = AdaptingEcho(settings, SECRET)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
async def adapters(
    engine: AdaptingEcho, settings: EngineSettings
) -> AsyncIterator[AdapterRegistry]:
    library = AdapterLibrary(["file:///"], cache_dir=None, cache_bytes=1 << 20, max_bytes=1 << 23)
    adapters = AdapterRegistry(engine, library, SECRET, most=settings.cpu_loras, drain_seconds=5)
    yield adapters
    await adapters.close()


class Speaking(AdaptingEcho):
    """The worker of a talker."""

    @property
    def card(self) -> ModelCard:
        audio = AudioCard(voices=("Ethan",), sample_rate=24000, samples_per_code=480)
        return replace(super().card, name="omni/talker", audio=audio, tasks=(Task.STAGE,))


@pytest.mark.extensions("stages")
async def test_what_nobody_publishes_is_refused_by_name_and_reason(
    settings: EngineSettings, adapters: AdapterRegistry, tmp_path: Path
) -> None:
    library = AdapterLibrary(["file:///"], cache_dir=None, cache_bytes=1 << 20, max_bytes=1 << 23)
    engine = Speaking(settings, SECRET)
    await engine.start()
    talker = AdapterRegistry(engine, library, SECRET, most=2, drain_seconds=5)
    order = LoadAdapter("a", str(write_lora(tmp_path / "a")))
    with pytest.raises(InvalidRequestError, match=r"`omni/talker` speaks: .* talkers and vocoders"):
        await talker.load(order)
    with pytest.raises(InvalidRequestError, match="trained prompts are for language models"):
        await talker.load(LoadAdapter("p", str(write_prompt(tmp_path / "p"))))
    assert talker.statuses() == []
    await talker.close()
    await engine.close()
    matrices = {f"unet.to_q.lora_{end}.weight": np.ones((2, 2), np.float32) for end in "AB"}
    (tmp_path / "b").mkdir()
    save_file(matrices, tmp_path / "b" / "pytorch_lora_weights.safetensors")
    with pytest.raises(InvalidRequestError, match=r"is of an image pipeline .*; `m` is none"):
        await adapters.load(LoadAdapter("b", str(tmp_path / "b")))
    assert names(adapters) == []


class Client:
    """One request and what it is told."""

    def __init__(
        self, host: EngineHost, name: str, adapter: str | None, max_tokens: int = 50_000
    ) -> None:
        self.deltas: list[Output] = []
        self.ended = asyncio.Event()
        prompt = Prompt.of(Tokens([1, 2, 3]))
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        host.submit(
            Request(id=name, prompts=(prompt,), params=sampling, adapter=adapter), self._take
        )

    def _take(self, output: Output) -> None:
        self.deltas.append(output)
        if output.finish_reason is not None:
            self.ended.set()

    async def last(self) -> Output:
        await asyncio.wait_for(self.ended.wait(), 30)
        return self.deltas[-1]


def names(adapters: AdapterRegistry) -> list[str]:
    return [adapter.name for adapter in adapters.ready]


def states(adapters: AdapterRegistry) -> dict[str, str]:
    return {status.name: status.state for status in adapters.statuses()}


async def test_what_is_loaded_is_in_the_card_at_once_and_gone_from_it_at_once(
    engine: AdaptingEcho, adapters: AdapterRegistry, tmp_path: Path
) -> None:
    host = EngineHost(engine, adapters)
    cards: list[ModelCard] = []
    host.watch(cards.append)
    found = await adapters.load(LoadAdapter("a", str(write_lora(tmp_path / "a"))))
    assert (found.kind, found.rank, len(found.content_id)) == ("lora", 2, 32)
    await adapters.unload("a")
    assert [[adapter.name for adapter in card.adapters] for card in cards] == [[], ["a"], []]
    assert not engine.held


async def test_the_same_name_ordered_twice_at_once_is_loaded_once(
    engine: AdaptingEcho, adapters: AdapterRegistry, tmp_path: Path
) -> None:
    order = LoadAdapter("a", str(write_lora(tmp_path / "a")))
    answers = await asyncio.gather(*(adapters.load(order) for _ in range(8)))
    assert len({id(answer) for answer in answers}) == 1
    assert engine.loads == 1


async def test_one_who_leaves_while_it_loads_takes_it_from_nobody(
    adapters: AdapterRegistry, tmp_path: Path
) -> None:
    order = LoadAdapter("a", str(write_lora(tmp_path / "a")))
    first = asyncio.create_task(adapters.load(order))
    second = asyncio.create_task(adapters.load(order))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).name == "a"


async def test_a_name_that_is_taken_is_a_collision_whatever_state_it_is_in(
    adapters: AdapterRegistry, tmp_path: Path
) -> None:
    one, other = write_lora(tmp_path / "a"), write_lora(tmp_path / "b", seed=2)
    loading = asyncio.create_task(adapters.load(LoadAdapter("a", str(one))))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequestError, match="is being loaded from"):
        await adapters.load(LoadAdapter("a", str(other)))
    await loading
    with pytest.raises(InvalidRequestError, match="has already been loaded"):
        await adapters.load(LoadAdapter("a", str(other)))
    for name in ("m", "alias"):
        with pytest.raises(InvalidRequestError, match="conflicts with a served base model"):
            await adapters.load(LoadAdapter(name, str(one)))
    with pytest.raises(InvalidRequestError, match="is for the base model 'other'"):
        await adapters.load(LoadAdapter("c", str(one), base_model="other"))


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "a\x00"])
async def test_a_name_must_be_one(adapters: AdapterRegistry, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="printable characters"):
        await adapters.load(LoadAdapter(name, str(write_lora(tmp_path / "a"))))


async def test_unloading_refuses_new_requests_lets_running_ones_end_and_then_frees(
    engine: AdaptingEcho, adapters: AdapterRegistry, tmp_path: Path
) -> None:
    host = EngineHost(engine, adapters)
    await adapters.load(LoadAdapter("a", str(write_lora(tmp_path / "a"))))
    running = Client(host, "1", "a", 3000)
    unloading = asyncio.create_task(adapters.unload("a"))
    await asyncio.sleep(0)
    refused = Client(host, "2", "a")
    error = (await refused.last()).error
    assert error is not None
    assert (error.kind, error.code) == ("NotFoundError", "model_not_found")
    assert states(adapters) == {"a": "draining"}
    assert engine.held
    last = await running.last()
    assert (last.finish_reason, last.usage and last.usage.completion_tokens) == ("length", 3000)
    await unloading
    assert not engine.held
    assert not adapters.statuses()


async def test_requests_that_do_not_end_in_time_are_aborted(
    engine: AdaptingEcho, adapters: AdapterRegistry, tmp_path: Path
) -> None:
    host = EngineHost(engine, adapters)
    await adapters.load(LoadAdapter("a", str(write_lora(tmp_path / "a"))))
    running, base = Client(host, "1", "a"), Client(host, "2", None)
    await adapters.unload("a", 0)
    assert (await running.last()).finish_reason == "abort"
    assert not base.ended.is_set()
    assert not engine.held


async def test_unloading_twice_at_once_gives_both_the_same_answer(
    engine: AdaptingEcho, adapters: AdapterRegistry, tmp_path: Path
) -> None:
    host = EngineHost(engine, adapters)
    await adapters.load(LoadAdapter("a", str(write_lora(tmp_path / "a"))))
    Client(host, "1", "a", 500)
    await asyncio.gather(adapters.unload("a"), adapters.unload("a"))
    with pytest.raises(NotFoundError, match="cannot be found"):
        await adapters.unload("a")


async def test_unloading_what_is_loading_waits_for_it(
    engine: AdaptingEcho, adapters: AdapterRegistry, tmp_path: Path
) -> None:
    loading = asyncio.create_task(adapters.load(LoadAdapter("a", str(write_lora(tmp_path / "a")))))
    await asyncio.sleep(0)
    await adapters.unload("a")
    assert (await loading).name == "a"
    assert not engine.held
    assert not adapters.ready


@pytest.mark.parametrize("failure", ["load_adapter", "refuses", "traces"])
async def test_an_engine_that_fails_to_load_is_left_with_nothing(
    engine: AdaptingEcho, adapters: AdapterRegistry, tmp_path: Path, failure: str
) -> None:
    order = LoadAdapter("a", str(write_lora(tmp_path / "a")))
    engine.leaves_traces = failure == "traces"
    engine.failing.add("load_adapter" if engine.leaves_traces else failure)
    with pytest.raises(InvalidRequestError if failure == "refuses" else EngineError):
        await adapters.load(order)
    assert not adapters.statuses()
    assert not engine.held
    engine.leaves_traces = False
    await adapters.load(order)
    assert names(adapters) == ["a"]


async def test_what_the_engine_cannot_free_is_failed_and_can_be_unloaded_again(
    engine: AdaptingEcho, adapters: AdapterRegistry, tmp_path: Path
) -> None:
    await adapters.load(LoadAdapter("a", str(write_lora(tmp_path / "a"))))
    engine.failing.add("unload_adapter")
    with pytest.raises(
        EngineError, match="could not be freed: unload_adapter failed; unload it again"
    ):
        await adapters.unload("a")
    assert (names(adapters), states(adapters)) == ([], {"a": "failed"})
    (status,) = adapters.statuses()
    assert status.reason == "unload_adapter failed"
    await adapters.unload("a")
    assert not adapters.statuses()
    assert not engine.held


async def test_another_content_takes_a_names_place_while_the_first_still_runs(
    engine: AdaptingEcho, adapters: AdapterRegistry, tmp_path: Path
) -> None:
    host = EngineHost(engine, adapters)
    first = await adapters.load(LoadAdapter("a", str(write_lora(tmp_path / "a"))))
    other = write_lora(tmp_path / "b", seed=2)
    running = Client(host, "1", "a")
    second = await adapters.load(LoadAdapter("a", str(other), in_place=True))
    assert second.content_id != first.content_id
    assert [adapter.content_id for adapter in adapters.ready] == [second.content_id]
    assert len(engine.held) == 2
    later = Client(host, "2", "a", 1)
    assert (await later.last()).finish_reason == "length"
    host.abort("1")
    assert (await running.last()).finish_reason == "abort"
    await asyncio.gather(*adapters._leaving.values())
    assert list(engine.held) == [f"a@{second.content_id}"]


async def test_the_same_content_in_place_changes_nothing(
    engine: AdaptingEcho, adapters: AdapterRegistry, tmp_path: Path
) -> None:
    order = LoadAdapter("a", str(write_lora(tmp_path / "a")), in_place=True)
    first = await adapters.load(order)
    assert await adapters.load(order) is first
    assert engine.loads == 1


async def test_a_content_that_will_not_do_leaves_the_one_before_in_its_place(
    engine: AdaptingEcho, adapters: AdapterRegistry, tmp_path: Path
) -> None:
    first = await adapters.load(LoadAdapter("a", str(write_lora(tmp_path / "a"))))
    bad = write_lora(tmp_path / "bad", use_dora=True)
    with pytest.raises(InvalidRequestError, match="use_dora"):
        await adapters.load(LoadAdapter("a", str(bad), in_place=True))
    assert adapters.ready == (first,)


async def test_there_is_room_for_so_many_and_for_one_to_take_anothers_place(
    engine: AdaptingEcho, adapters: AdapterRegistry, tmp_path: Path
) -> None:
    for index, name in enumerate("abc"):
        await adapters.load(LoadAdapter(name, str(write_lora(tmp_path / name, seed=index))))
    with pytest.raises(InvalidRequestError, match=r"room for 3 adapters \(--max-cpu-loras\)"):
        await adapters.load(LoadAdapter("d", str(write_lora(tmp_path / "d", seed=9))))
    await adapters.load(LoadAdapter("a", str(tmp_path / "d"), in_place=True))
    await adapters.unload("b")
    await adapters.load(LoadAdapter("e", str(tmp_path / "b")))
    assert names(adapters) == ["a", "c", "e"]


async def test_trained_rows_stand_before_every_prompt_on_any_engine(
    engine: AdaptingEcho, adapters: AdapterRegistry, tmp_path: Path
) -> None:
    found = await adapters.load(LoadAdapter("p", str(write_prompt(tmp_path / "p"))))
    assert (found.kind, found.num_positions) == ("prompt", 3)
    assert not engine.held
    request = Request(
        id="1", prompts=(Prompt.of(Tokens([7, 8])),), params=Sampling(max_tokens=5), adapter="p"
    )
    seen = adapters.enter(request, lambda _: None).request
    rows, tokens = seen.prompt.segments
    assert isinstance(rows, Rows)
    assert (seen.adapter, len(rows), tokens) == (None, 3, Tokens([7, 8]))
    assert rows.digests is not None
    last = await Client(EngineHost(engine, adapters), "2", "p", 1).last()
    assert last.usage is not None
    assert last.usage.prompt_tokens == 6


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"hidden": 4}, "hidden size"),
        ({"count": 100_000}, "no room for a prompt"),
    ],
)
async def test_rows_that_the_model_cannot_take_are_refused(
    adapters: AdapterRegistry, tmp_path: Path, options: dict[str, int], match: str
) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        await adapters.load(LoadAdapter("p", str(write_prompt(tmp_path / "p", **options))))
    assert not adapters.statuses()


async def test_the_modules_named_at_the_start_are_there_before_the_first_request(
    engine: AdaptingEcho, settings: EngineSettings, tmp_path: Path
) -> None:
    modules = [
        f"a={write_lora(tmp_path / 'a')}",
        json.dumps(
            {"name": "p", "path": str(write_prompt(tmp_path / "p")), "base_model_name": "alias"}
        ),
    ]
    host = await host_of(engine, settings.replace(lora_modules=modules), SECRET)
    assert [adapter.name for adapter in host.card.adapters] == ["a", "p"]
    with pytest.raises(NotFoundError, match="No adapter found"):
        await host_of(engine, settings.replace(lora_modules=[f"b={tmp_path / 'none'}"]), SECRET)
    await host.close()


@pytest.mark.parametrize(
    "module", ["a", "=b", "a=", "{}", '{"name": "a"}', '{"name": "a", "path": "b", "x": 1}']
)
def test_a_module_that_says_too_little_or_too_much_is_refused(module: str) -> None:
    with pytest.raises(InvalidRequestError, match="LoRA module"):
        parse_modules([module])


async def test_commands_load_list_and_unload(
    engine: AdaptingEcho, adapters: AdapterRegistry, tmp_path: Path
) -> None:
    host = EngineHost(engine, adapters)
    path = str(write_lora(tmp_path / "a"))
    loaded = await host.call(LoadAdapter("a", path))
    assert loaded.content_id == adapters.ready[0].content_id
    (status,) = (await host.call(ListAdapters())).adapters
    assert (status.name, status.state, status.kind) == ("a", "ready", "lora")
    await host.call(UnloadAdapter("a"))
    assert not (await host.call(ListAdapters())).adapters
    with pytest.raises(InvalidRequestError, match="lora_path is empty"):
        await host.call(LoadAdapter("a", ""))


async def test_a_lora_for_a_model_of_other_sizes_never_reaches_the_engine(
    engine: AdaptingEcho, adapters: AdapterRegistry, tmp_path: Path
) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({name: np.ones((HIDDEN, HIDDEN * 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequestError, match="made for another model"):
        await adapters.load(LoadAdapter("a", str(write_lora(tmp_path / "a"))))
    assert engine.loads == 0
    assert not adapters.statuses()


async def test_a_worker_that_takes_anothers_place_has_its_adapters(
    engine: AdaptingEcho, adapters: AdapterRegistry, settings: EngineSettings, tmp_path: Path
) -> None:
    modules = [f"a={write_lora(tmp_path / 'a')}"]
    await adapters.load(LoadAdapter("a", str(tmp_path / "a")))
    await adapters.load(LoadAdapter("p", str(write_prompt(tmp_path / "p"))))
    before = EngineHost(engine, adapters).card
    successor = AdaptingEcho(settings, SECRET)
    await successor.start()
    host = await host_of(successor, settings.replace(lora_modules=modules), SECRET)
    await host.restore(restoring(before))
    assert set(host.card.adapters) == set(before.adapters)
    assert successor.loads == 1
    await host.close()
    await successor.close()


@pytest.mark.parametrize(
    "change",
    [
        {"lora_modules": ["a"]},
        {"allowed_lora_sources": ["gopher://host/"]},
        {"lora_modules": ["a=/a", "b=/b"], "max_cpu_loras": 1},
    ],
)
def test_what_cannot_be_is_said_before_a_model_is_loaded(
    settings: EngineSettings, change: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError):
        check_adapters(settings.replace(**change))
    check_adapters(settings)
