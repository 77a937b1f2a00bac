"""Conformance tests of engines with LoRA adapters.

An engine's own test module subclasses `AdapterConformance`.

Its fixtures are `directory` (a model of `tests.models`, float32) and `settings`, with room for 3
adapters and `max_lora_rank` 8.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from inlay import engine as engines
from inlay.adapter.files import content_id, open_adapter
from inlay.base.errors import InlayError, InvalidRequestError, NotFoundError
from inlay.engine.api import AdapterEngine, GenerateEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.card import Adapter
from inlay.messages.prompt import Prompt, Tokens
from tests import adapters
from tests.engine import reference
from tests.engine.conformance import SECRET, Receiver, ids, make_request, run


class Adapting(GenerateEngine, AdapterEngine):
    """An engine that does both."""


def described(name: str, path: Path) -> Adapter:
    """The `Adapter` that a worker would build."""
    return Adapter(name=name, content_id=content_id(open_adapter(path)), path=str(path))


async def load(engine: AdapterEngine, name: str, path: Path) -> None:
    await engine.load_adapter(described(name, path), str(path))


class AdapterConformance:
    """Engine-independent tests of `AdapterEngine`."""

    @pytest_asyncio.fixture
    async def engine(self, settings: EngineSettings) -> AsyncIterator[Adapting]:
        engine = engines.create(settings, SECRET)
        await engine.start()
        assert isinstance(engine, GenerateEngine)
        assert isinstance(engine, AdapterEngine)
        yield engine  # type: ignore[misc]
        await engine.close()

    @pytest.fixture
    def lora(self, directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return adapters.make_lora(tmp_path_factory.mktemp("lora"), directory)

    async def test_an_adapter_decodes_as_pefts_merged_model_does(
        self, engine: Adapting, directory: Path, lora: Path
    ) -> None:
        await load(engine, "a", lora)
        prompt = Prompt.of(Tokens(ids(1, 45)))
        with_adapter, without = await run(
            engine, make_request("1", prompt, 16, adapter="a"), make_request("2", prompt, 16)
        )
        assert with_adapter.output == adapters.greedy(directory, lora, prompt, 16)
        assert without.output == reference.greedy(directory, prompt, 16)
        assert with_adapter.output != without.output

    @pytest.mark.parametrize(
        "options",
        [
            {"use_rslora": True},
            {
                "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 8},
                "alpha_pattern": {"v_proj": 3},
            },
            {"targets": ("o_proj",), "rank": 8},
            {"targets": ("v_proj", "up_proj"), "rank": 1},
        ],
        ids=["rank-stabilised", "patterns", "one-module", "parts"],
    )
    async def test_whatever_peft_can_say_of_ranks_scales_and_modules_is_honoured(
        self, engine: Adapting, directory: Path, tmp_path: Path, options: dict[str, object]
    ) -> None:
        path = adapters.make_lora(tmp_path, directory, seed=5, **options)  # type: ignore[arg-type]
        await load(engine, "a", path)
        prompt = Prompt.of(Tokens(ids(2, 21)))
        (found,) = await run(engine, make_request("1", prompt, adapter="a"))
        assert found.output == adapters.greedy(directory, path, prompt, 8)

    async def test_several_adapters_base_and_rows_in_one_batch_do_not_disturb_each_other(
        self, engine: Adapting, directory: Path, lora: Path, tmp_path: Path
    ) -> None:
        second = adapters.make_lora(
            tmp_path / "b", directory, seed=2, rank=8, targets=("q_proj", "v_proj"), size=1.5
        )
        third = adapters.make_lora(tmp_path / "c", directory, seed=3, rank=2)
        paths = {"a": lora, "b": second, "c": third, None: None}
        for name, path in paths.items():
            if name is not None and path is not None:
                await load(engine, name, path)
        prompts = [
            Prompt.of(Tokens(ids(1, 40))),
            Prompt.of(
                reference.rows_of(reference.look_up(directory, ids(7, 9))), Tokens(ids(3, 20))
            ),
            Prompt.of(Tokens(ids(4, 3))),
        ]
        requests = [
            make_request(f"{name}-{index}", prompt, 12, adapter=name)
            for index, prompt in enumerate(prompts)
            for name in paths
        ]
        received = await run(engine, *requests)
        for one, found in zip(requests, received, strict=True):
            path = paths[one.adapter]
            expected = (
                reference.greedy(directory, one.prompt, 12)
                if path is None
                else adapters.greedy(directory, path, one.prompt, 12)
            )
            assert found.output == expected, one.id

    async def test_what_is_cached_for_an_adapter_is_for_nobody_else(
        self, engine: Adapting, directory: Path, lora: Path, tmp_path: Path
    ) -> None:
        other = adapters.make_lora(tmp_path, directory, seed=9)
        await load(engine, "a", lora)
        await load(engine, "b", other)
        prompt = Prompt.of(Tokens(ids(11, 50)))
        outputs = {}
        for name in (None, "a", "b"):
            (first,) = await run(engine, make_request(f"first-{name}", prompt, adapter=name))
            (again,) = await run(engine, make_request(f"again-{name}", prompt, adapter=name))
            assert (first.cached, again.cached > 0) == (0, True)
            assert first.output == again.output
            outputs[name] = first.output
        assert outputs["a"] == adapters.greedy(directory, lora, prompt, 8)
        assert outputs["b"] == adapters.greedy(directory, other, prompt, 8)

    async def test_another_adapter_under_a_name_that_was_used_before_finds_nothing_cached(
        self, engine: Adapting, directory: Path, lora: Path, tmp_path: Path
    ) -> None:
        other = adapters.make_lora(tmp_path, directory, seed=12)
        prompt = Prompt.of(Tokens(ids(12, 50)))
        await load(engine, "a", lora)
        await run(engine, make_request("1", prompt, adapter="a"))
        await engine.unload_adapter("a")
        await load(engine, "a", other)
        (found,) = await run(engine, make_request("2", prompt, adapter="a"))
        assert found.cached == 0
        assert found.output == adapters.greedy(directory, other, prompt, 8)

    async def test_an_adapter_that_is_not_there_is_refused_and_nothing_is_admitted(
        self, engine: Adapting, lora: Path
    ) -> None:
        one = make_request("1", Prompt.of(Tokens([1, 2])), adapter="a")
        with pytest.raises(InlayError) as unknown:
            engine.submit(one, Receiver(one))
        assert isinstance(unknown.value, NotFoundError)
        await load(engine, "a", lora)
        await engine.unload_adapter("a")
        with pytest.raises(NotFoundError):
            engine.submit(one, Receiver(one))

    async def test_there_is_room_for_so_many_and_again_once_one_has_gone(
        self, engine: Adapting, lora: Path
    ) -> None:
        """One more than are kept, so that one can take another's place."""
        for name in "abcd":
            await load(engine, name, lora)
        with pytest.raises(InvalidRequestError, match="adapters are loaded"):
            await load(engine, "e", lora)
        await engine.unload_adapter("b")
        await load(engine, "e", lora)

    async def test_too_large_a_rank_is_refused(
        self, engine: Adapting, directory: Path, tmp_path: Path
    ) -> None:
        path = adapters.make_lora(tmp_path, directory, rank=9)
        with pytest.raises(InvalidRequestError, match=r"rank.*9.*8"):
            await load(engine, "a", path)
