"""Models that take images in SGLang: the tokens of transformers, however an image comes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import pytest_asyncio
import torch

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.messages.digest import with_digests
from inlay.messages.prompt import Buffer, Media, Prompt, Tokens
from tests.engine.conformance import make_request, run
from tests.engine.reference import rows_of
from tests.engine.torch.vision_reference import Picture
from tests.engines import images
from tests.engines.sglang.serving import FLAGS, PATCH
from tests.engines.starting import SECRET, running
from tests.engines.vision import (
    NEW,
    ONE,
    PROMPTS,
    TWO,
    Vision,
    mixtures_continue_as_transformers_does,
    prompts_continue_as_transformers_does,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


@asynccontextmanager
async def started(family: str, **more: Any) -> AsyncIterator[Vision]:
    directory = images.directory_of(family, PATCH)
    settings = EngineSettings.of(model=str(directory), enable_mm_embeds=True, **FLAGS | more)
    async with running(settings) as engine:
        yield Vision(engine, directory, {})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def vision() -> AsyncIterator[Vision]:
    """Prompts are computed by 32 positions, which cut images."""
    async with started("qwen2_5_vl", max_num_batched_tokens=32) as found:
        yield found


async def test_prompts_with_images_continue_as_transformers_does_alone_and_together(
    vision: Vision,
) -> None:
    await prompts_continue_as_transformers_does(vision)


async def test_a_second_ask_finds_images_and_what_follows_in_the_cache(vision: Vision) -> None:
    prompt = vision.prompt(PROMPTS["both"])
    await vision.engine.reset_prefix_cache()
    first, second = await vision.ask(prompt), await vision.ask(prompt)
    assert (first.cached, second.cached) == (0, len(prompt) - 1)
    assert first.output == second.output == vision.wanted(PROMPTS["both"])
    # Another image of the same size at the same place is another prompt.
    parts = [part if part != ONE else Picture(7, 40, 56) for part in PROMPTS["both"]]
    other = await vision.ask(vision.prompt(parts))
    assert other.cached == len(PROMPTS["both"][0])  # type: ignore[arg-type]
    assert other.output == vision.wanted(parts)


async def test_tenants_do_not_share_an_image(vision: Vision) -> None:
    prompt = vision.prompt(PROMPTS["one"])
    await vision.engine.reset_prefix_cache()
    found = [await vision.ask(prompt, salt=salt) for salt in ("a", "b", "a")]
    assert [one.cached for one in found] == [0, 0, len(prompt) - 1]
    assert {tuple(one.output) for one in found} == {tuple(vision.wanted(PROMPTS["one"]))}
    media = vision.engine._loaded.media
    keys = []
    for salt in ("a", "b", "a"):
        given = await media.input_of(make_request("x", prompt, salt=salt))
        (item,) = given["image_data"][0].mm_items
        keys.append((item.identity, item.hash, item.pad_values))
    assert keys[0] == keys[2]
    assert not set(keys[0]) & set(keys[1])


async def test_rows_of_a_clients_own_encoder_are_the_image_and_mix_with_files_and_rows(
    vision: Vision,
) -> None:
    await mixtures_continue_as_transformers_does(vision)


async def test_a_prompt_with_rows_is_found_by_the_same_rows_alone(vision: Vision) -> None:
    words = list(range(3, 43))
    prompt = Prompt.of(Tokens(words), *vision.embeds(ONE), vision.rows(list(range(50, 90))))
    await vision.engine.reset_prefix_cache()
    text = await vision.ask(Prompt.of(Tokens(words)))
    found = [await vision.ask(with_digests(prompt, SECRET)) for _ in range(2)]
    assert [one.cached for one in found] == [0, len(prompt) - 1]
    assert found[0].output == found[1].output
    assert text.output == vision.wanted([words])
    other = await vision.ask(with_digests(prompt + Prompt.of(vision.rows([7])), SECRET))
    assert other.cached == 0
    salted = [await vision.ask(with_digests(prompt, SECRET), salt=each) for each in ("a", "b")]
    assert [one.cached for one in salted] == [0, 0]


async def test_an_image_is_resumed_where_another_worker_left_it(vision: Vision) -> None:
    wanted = vision.wanted(PROMPTS["both"])
    for count in (1, 5, NEW - 1):
        found = await vision.ask(vision.prompt(PROMPTS["both"]), prior_output=tuple(wanted[:count]))
        assert found.output == wanted[count:]


async def test_bad_files_and_rows_end_their_own_request_and_touch_no_other(
    vision: Vision,
) -> None:
    prompt = vision.prompt(PROMPTS["one"])

    def lying(**changes: Any) -> Prompt:
        segments = [
            msgspec.structs.replace(each, **changes) if isinstance(each, Media) else each
            for each in prompt.segments
        ]
        return Prompt(tuple(segments))

    whole = bytes(ONE.data)
    hidden = vision.engine.card.hidden_size
    bad = {
        "pixels": lying(data=Buffer(whole[:60] + bytes(200) + whole[260:])),
        "cut": lying(data=Buffer(whole[:50])),
        "no picture": lying(data=Buffer(b"no picture at all" * 20)),
        "another size": lying(data=Buffer(Picture(9, 300, 200).data)),
        "NaN": Prompt.of(Tokens([5, 6]), rows_of(torch.full((40, hidden), float("nan")))),
    }
    under_way = [make_request(name, vision.prompt(parts), NEW) for name, parts in PROMPTS.items()]
    requests = [make_request(name, with_digests(each, SECRET), NEW) for name, each in bad.items()]
    found = {one.request.id: one for one in await run(vision.engine, *under_way, *requests)}
    for name in bad:
        error = found[name].last.error
        assert error is not None
        kind = type(error.to_error())
        assert (kind is InvalidRequestError) == (name != "NaN"), (name, error)
    for name, parts in PROMPTS.items():
        assert found[name].output == vision.wanted(parts), str(found[name].last.error)
        assert (await vision.ask(vision.prompt(parts))).output == vision.wanted(parts)


async def test_a_part_of_an_image_is_refused(vision: Vision) -> None:
    whole = vision.prompt([[5, 6], ONE, [7]])
    for start, stop in ((0, 5), (4, len(whole))):
        part = await vision.ask(whole.slice(start, stop))
        assert part.last.error is not None
        assert "without the rest of it" in part.last.error.message


async def test_sglang_alone_ends_where_a_file_and_embeddings_of_an_image_meet() -> None:
    """Why rows are items of another kind: here they are what SGLang's own API makes of them."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.schedule_batch import Modality

    async with started("qwen2_5_vl") as vision:
        prompts = Prompt.of(Tokens([5]), *vision.embeds(TWO)), vision.prompt([[5], ONE])

        async def asked(number: int, prompt: Prompt) -> None:
            own = Tokens([5 + number // 100, 5 + number % 100])
            whole = with_digests(Prompt.of(own) + prompt, SECRET)
            given = await vision.engine._loaded.media.input_of(make_request("x", whole))
            for item in given["image_data"][0].mm_items:
                item.modality = Modality.IMAGE
            request = GenerateReqInput(
                rid=uuid4().hex,
                sampling_params={"max_new_tokens": 2, "temperature": 0.0},
                stream=True,
                **given,
            )
            async for _ in vision.engine._process.answers(request):
                pass

        ends: list[BaseException | None] = []
        # Until some of both come into one step.
        while not any(ends):
            first = len(ends)
            numbers = range(first, first + 16)
            tasks = [asked(number, prompts[number % 2]) for number in numbers]
            ends += await asyncio.gather(*tasks, return_exceptions=True)
            assert len(ends) < 480
        assert any(isinstance(end, EngineError) and "died" in end.message for end in ends)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
async def test_other_families_continue_as_transformers_does_and_are_cached(family: str) -> None:
    async with started(family) as vision:
        prompts = {name: vision.prompt(parts) for name, parts in PROMPTS.items()}
        requests = [make_request(name, prompt, NEW) for name, prompt in prompts.items()]
        for one in await run(vision.engine, *requests):
            assert one.output == vision.wanted(PROMPTS[one.request.id])
            again = await vision.ask(prompts[one.request.id])
            assert (again.cached, again.output) == (len(one.request.prompt) - 1, one.output)
        await mixtures_continue_as_transformers_does(vision)
