"""LoRA adapters in the torch engine."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from inlay.base.errors import EngineError, InvalidRequestError, NotFoundError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.adapter_turns import TURN
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.lora import BASE, AdaptedLinear, LoraBank, LowRankPair, Selection
from inlay.engine.torch.native import kernels
from inlay.messages.prompt import Prompt, Tokens
from tests import adapters
from tests.engine.adapter_conformance import AdapterConformance, Adapting, load
from tests.engine.conformance import SECRET, Receiver, ids, make_request, run
from tests.models import make, tiny


def settings_of(directory: Path, **changes: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "model": str(directory),
        "device": "cpu",
        "num_threads": 1,
        "kv_cache_memory_bytes": 8 << 20,
        "enable_lora": True,
        "max_loras": 2,
        "max_cpu_loras": 3,
        "max_lora_rank": 8,
    }
    return EngineSettings.of(**(values | changes))


class TestTorchAdapters(AdapterConformance):
    @pytest.fixture(params=["llama", "qwen3"])
    def directory(self, request: pytest.FixtureRequest) -> Path:
        return tiny(request.param)

    @pytest.fixture
    def settings(self, directory: Path) -> EngineSettings:
        # Prompts of several steps, so that steps with and without adapters alternate.
        return settings_of(directory, max_num_batched_tokens=32)

    async def test_an_adapter_of_another_model_is_refused_and_leaves_nothing(
        self, engine: Adapting, tmp_path: Path, lora: Path
    ) -> None:
        path = adapters.make_lora(tmp_path, tiny("mistral"))
        with pytest.raises(InvalidRequestError, match=r"another model|does not have"):
            await load(engine, "a", path)
        for name in "abcd":
            await load(engine, name, lora)
        await engine.unload_adapter("a")
        with pytest.raises(NotFoundError):
            await engine.unload_adapter("a")


class TestTorchAdaptersInOverlap(TestTorchAdapters):
    """Each step is launched before the last is read."""

    @pytest.fixture(params=["llama"])
    def directory(self, request: pytest.FixtureRequest) -> Path:
        return tiny(request.param)

    @pytest.fixture
    def settings(self, directory: Path) -> EngineSettings:
        return settings_of(directory, max_num_batched_tokens=32, async_scheduling=True)


@pytest.mark.parametrize(
    "family", ["gemma2", "phi3", "qwen3_5_text", "qwen3_moe", "qwen3_next", "deepseek_v3"]
)
async def test_linears_of_other_shapes_take_adapters_too(family: str, tmp_path: Path) -> None:
    directory = tiny(family)
    targets = {
        "phi3": ("qkv_proj", "gate_up_proj", "o_proj"),
        "qwen3_5_text": (*adapters.ALL, "in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj"),
        "qwen3_moe": adapters.ATTENTION,
        "qwen3_next": (*adapters.ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"),
        "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    }.get(family, adapters.ALL)
    path = adapters.make_lora(tmp_path, directory, targets=targets)
    engine = TorchEngine(settings_of(directory), SECRET)
    await engine.start()
    try:
        await load(engine, "a", path)
        prompt = Prompt.of(Tokens(ids(1, 20)))
        (found,) = await run(engine, make_request("1", prompt, adapter="a"))
        assert found.output == adapters.greedy(directory, path, prompt, 8)
    finally:
        await engine.close()


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
async def test_an_adapter_of_the_head_or_the_table_is_refused_by_name(
    target: str, tmp_path: Path
) -> None:
    directory = tiny("llama")
    path = adapters.make_lora(tmp_path, directory, targets=("q_proj", target))
    engine = TorchEngine(settings_of(directory), SECRET)
    await engine.start()
    try:
        with pytest.raises(InvalidRequestError, match=target):
            await load(engine, "a", path)
    finally:
        await engine.close()


@pytest.mark.thorough
async def test_more_adapters_than_a_step_has_room_for_take_turns_and_change_nothing(
    tmp_path: Path,
) -> None:
    directory = tiny("llama")
    engine = TorchEngine(settings_of(directory, max_loras=2, max_cpu_loras=9), SECRET)
    await engine.start()
    try:
        paths = {
            f"a{n}": adapters.make_lora(tmp_path / str(n), directory, seed=n) for n in range(9)
        }
        for name, path in paths.items():
            await load(engine, name, path)
        prompt = Prompt.of(Tokens(ids(1, 20)))
        count = 2 * TURN + 3
        requests = [make_request(name, prompt, count, adapter=name) for name in paths]
        found = await run(engine, *requests, make_request("base", prompt, count))
        for name, one in zip(paths, found, strict=False):
            assert one.output == adapters.greedy(directory, paths[name], prompt, count), name
        await engine.unload_adapter("a4")
        await load(engine, "a4", paths["a5"])
        (other,) = await run(engine, make_request("again", prompt, 8, adapter="a4"))
        assert other.output == adapters.greedy(directory, paths["a5"], prompt, 8)
    finally:
        await engine.close()


async def test_long_outputs_do_not_hold_up_a_request_for_another_adapter(tmp_path: Path) -> None:
    directory = tiny("llama")
    engine = TorchEngine(settings_of(directory, max_loras=1), SECRET)
    await engine.start()
    try:
        for n, name in enumerate("ab"):
            await load(engine, name, adapters.make_lora(tmp_path / name, directory, seed=n))
        prompt = Prompt.of(Tokens(ids(1, 20)))
        long = make_request("long", prompt, 400, adapter="a")
        beside = Receiver(long)
        engine.submit(long, beside)
        await beside.begun()
        (found,) = await run(engine, make_request("short", prompt, 4, adapter="b"))
        assert len(found.output) == 4
        # It had waited for the end of a turn, and not of an output.
        assert len(beside.output) < 400
        engine.abort("long")
        await beside.ended()
    finally:
        await engine.close()


async def test_without_the_flag_adapters_are_refused(tmp_path: Path) -> None:
    directory = tiny("llama")
    engine = TorchEngine(settings_of(directory, enable_lora=False), SECRET)
    await engine.start()
    try:
        with pytest.raises(InvalidRequestError, match="--enable-lora"):
            await load(engine, "a", adapters.make_lora(tmp_path, directory))
    finally:
        await engine.close()


async def test_an_adapter_in_use_does_not_go(tmp_path: Path) -> None:
    directory = tiny("llama")
    engine = TorchEngine(settings_of(directory), SECRET)
    await engine.start()
    try:
        await load(engine, "a", adapters.make_lora(tmp_path, directory))
        one = make_request("1", Prompt.of(Tokens(ids(1, 20))), 100, adapter="a")
        receiver = Receiver(one)
        engine.submit(one, receiver)
        await receiver.begun()
        with pytest.raises(EngineError, match="in use"):
            await engine.unload_adapter("a")
        engine.abort("1")
        await receiver.ended()
        await engine.unload_adapter("a")
    finally:
        await engine.close()


async def test_in_bfloat16_an_adapter_changes_the_output_as_in_pefts_model(tmp_path: Path) -> None:
    """Greedy tokens may part where two are nearly as likely; the first does not here."""
    directory = make("llama", tmp_path / "model", dtype="bfloat16")
    path = adapters.make_lora(tmp_path / "lora", directory)
    engine = TorchEngine(settings_of(directory), SECRET)
    await engine.start()
    try:
        await load(engine, "a", path)
        prompts = [Prompt.of(Tokens(ids(seed, 20))) for seed in range(6)]
        found = await asyncio.gather(
            *(
                run(engine, make_request(str(n), prompt, 1, adapter="a"))
                for n, prompt in enumerate(prompts)
            )
        )
        expected = [adapters.greedy(directory, path, prompt, 1) for prompt in prompts]
        assert sum(one.output == other for (one,), other in zip(found, expected, strict=True)) >= 5
    finally:
        await engine.close()


def test_a_step_without_adapters_selects_nothing() -> None:
    assert Selection.of((), (3, 4), 8, torch.device("cpu")) is None
    assert Selection.of((BASE, BASE), (3, 4), 8, torch.device("cpu")) is None


def test_a_step_for_one_adapter_needs_no_mask() -> None:
    selection = Selection.of((2, 2), (1, 1), 4, torch.device("cpu"))
    assert selection is not None
    assert selection[:3] == (2, 3, None)
    assert selection.rows.tolist() == [0, 1, 2, 3]


def test_a_selection_orders_positions_by_slot_and_leaves_out_those_without() -> None:
    selection = Selection.of((2, BASE, 0, 2), (2, 1, 1, 1), 6, torch.device("cpu"))
    assert selection is not None
    assert selection.rows.tolist() == [3, 0, 1, 4, 5]
    assert selection.slots.tolist() == [0, 2, 2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_native_kernel_adds_what_products_add(dtype: torch.dtype, threads: int) -> None:
    native = kernels()
    if native is None:
        pytest.skip("no compiler here")
    sizes = [70, 33]
    linear = torch.nn.Linear(40, sum(sizes), dtype=dtype).requires_grad_(False)
    bank = LoraBank(slots=4, rank=5)
    fast = bank.adapt(linear, linear.weight, ["x", "y"], sizes, native)
    slow = bank.adapt(linear, linear.weight, ["v", "w"], sizes)
    for rank in (5, 1, 3):
        x, y = (
            LowRankPair(torch.randn(rank, 40, dtype=dtype), torch.randn(rank, size, dtype=dtype))
            for size in sizes
        )
        bank.put({"x": x, "y": y, "v": x, "w": y})
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for slots in ((0,), (0, 1, 2, 0, BASE, 1), (2,) * 11, (BASE, 1), (1, 0) * 16, (1, 0) * 17):
            given = torch.randn(1, len(slots), 40, dtype=dtype)
            selection = Selection.of(slots, (1,) * len(slots), len(slots), given.device)
            with torch.inference_mode(), bank.selected(selection):
                tolerance = 1e-5 if dtype == torch.float32 else 3e-2
                torch.testing.assert_close(
                    fast(given), slow(given), rtol=tolerance, atol=20 * tolerance
                )
    finally:
        torch.set_num_threads(before)


def test_what_adapters_add_to_a_position_does_not_depend_on_the_others() -> None:
    native = kernels()
    if native is None or not native.products.pairs:
        pytest.skip("no compiler or products of pairs of bfloat16 here")
    sizes = [70, 33]
    linear = torch.nn.Linear(40, sum(sizes)).bfloat16().requires_grad_(False)
    bank = LoraBank(slots=2, rank=5)
    adapted = bank.adapt(linear, linear.weight, ["x", "y"], sizes, native, invariant=True)
    assert isinstance(adapted, AdaptedLinear)
    for _ in range(2):
        bank.put(
            {
                name: LowRankPair(torch.randn(5, 40).bfloat16(), torch.randn(5, size).bfloat16())
                for name, size in zip("xy", sizes, strict=True)
            }
        )
    x, slots = torch.randn(1, 70, 40).bfloat16(), [0, 1, BASE] * 23 + [1]
    products: torch.Tensor = adapted(x)

    def added(start: int, stop: int) -> torch.Tensor:
        out = products[0, start:stop].clone()
        count = stop - start
        selection = Selection.of(slots[start:stop], (1,) * count, count, x.device)
        assert selection is not None
        adapted._add(selection, x[0, start:stop], out)
        return out

    with torch.inference_mode():
        whole = added(0, 70)
        for start, stop in ((0, 1), (1, 3), (3, 6), (5, 9), (20, 29), (0, 33), (69, 70)):
            assert torch.equal(added(start, stop), whole[start:stop])


@pytest.mark.parametrize("native", [True, False])
def test_what_is_not_finite_stays_with_its_own_position(native: bool) -> None:
    bank = LoraBank(slots=3, rank=2)
    linear = torch.nn.Linear(4, 5, bias=False)
    linear.weight.requires_grad_(False)
    adapted = bank.adapt(linear, linear.weight, ["x"], [5], kernels() if native else None)
    first = bank.put({"x": LowRankPair(torch.full((1, 4), 3e38), torch.ones(1, 5))})
    second = bank.put({"x": LowRankPair(torch.ones(2, 4), torch.ones(2, 5))})
    x = torch.ones(3, 4)
    with (
        torch.inference_mode(),
        bank.selected(Selection.of((first, BASE, second), (1, 1, 1), 3, x.device)),
    ):
        found = adapted(x)
    assert not torch.isfinite(found[0]).any()
    assert torch.equal(found[1], linear(x)[1])
    assert torch.allclose(found[2], linear(x)[2] + 8)


def test_a_slot_that_was_emptied_adds_nothing_to_whoever_comes_after() -> None:
    bank = LoraBank(slots=1, rank=2)
    linear = torch.nn.Linear(4, 5, bias=False)
    linear.weight.requires_grad_(False)
    adapted = bank.adapt(linear, linear.weight, ["x", "y"], [2, 3])
    slot = bank.put({"x": LowRankPair(torch.ones(2, 4), torch.ones(2, 2))})
    bank.remove(slot)
    slot = bank.put({"y": LowRankPair(torch.ones(1, 4), torch.ones(1, 3))})
    x = torch.ones(1, 4)
    with torch.inference_mode(), bank.selected(Selection.of((slot,), (1,), 1, x.device)):
        found = adapted(x)
    assert torch.allclose(found, linear(x) + torch.tensor([0.0, 0, 4, 4, 4]))


def test_a_module_that_is_not_there_leaves_no_slot_behind() -> None:
    bank = LoraBank(slots=1, rank=2)
    linear = torch.nn.Linear(4, 5)
    bank.adapt(linear, linear.weight.detach(), ["x"], [5])
    low = LowRankPair(torch.ones(2, 4), torch.ones(2, 5))
    with pytest.raises(EngineError, match="could not be put"):
        bank.put({"x": low, "z": low})
    assert bank.free == 1
