"""Models that take images in vLLM: the tokens of transformers, however an image comes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.media.positions import GRID_FIELD
from inlay.messages.digest import with_digests
from inlay.messages.prompt import Buffer, Media, Prompt, RowField, Rows, Tokens
from inlay.messages.request import Request
from inlay.worker.host import EngineHost
from tests.engine.conformance import Receiver, make_request, run
from tests.engine.torch.vision_reference import Picture
from tests.engines import images
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
from tests.engines.vllm.serving import FLAGS
from tests.engines.vllm.test_kv_events import Told, whole_blocks

pytestmark = pytest.mark.asyncio(loop_scope="session")


@asynccontextmanager
async def started(family: str, **processing: Any) -> AsyncIterator[Vision]:
    directory = images.directory_of(family)
    given: dict[str, Any] = {"mm_processor_kwargs": json.dumps(processing)} if processing else {}
    settings = EngineSettings.of(model=str(directory), enable_mm_embeds=True, **given, **FLAGS)
    async with running(settings) as engine:
        yield Vision(engine, directory, processing)


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["qwen2_5_vl", "llava"])
async def vision(request: pytest.FixtureRequest) -> AsyncIterator[Vision]:
    async with started(request.param) as found:
        yield found


SMALLER = {"size": {"shortest_edge": 256, "longest_edge": 1600}}
"""In place of the model's own, which are up to 2304."""


@pytest.mark.parametrize(
    ("family", "processing"),
    [
        ("qwen2_vl", SMALLER),
        *(
            (family, {})
            for family in (
                "glm4v", "idefics3", "internvl", "llava_next", "llava_onevision", "mistral3",
                "pixtral", "qwen3_vl", "smolvlm",
            )
        ),
    ],
)  # fmt: skip
async def test_other_families_continue_as_transformers_does_and_are_cached(
    family: str, processing: dict[str, Any]
) -> None:
    """Also as rows of the client's own, where no tokens stand between them."""
    async with started(family, **processing) as vision:
        told = Told(EngineHost(vision.engine))
        await vision.engine.reset_prefix_cache()
        await told.until(lambda keys: not keys)
        prompts = {name: vision.prompt(parts) for name, parts in PROMPTS.items()}
        wanted = {name: vision.wanted(parts) for name, parts in PROMPTS.items()}
        if vision.takes_embeds:
            parts = PROMPTS["both"][2:]
            encoded = Prompt.of(*vision.prompt(parts[:1]).segments, *vision.embeds(TWO))
            prompts["embeds"] = with_digests(encoded + vision.prompt(parts[2:]), SECRET)
            wanted["embeds"] = vision.wanted(parts)
        requests = [make_request(name, prompt, NEW) for name, prompt in prompts.items()]
        found = await run(vision.engine, *requests)
        for one in found:
            assert one.output == wanted[one.request.id], one.request.id
            await told.until(whole_blocks(told.host, one.request.prompt, one).issubset)
        for request in requests:
            (again,) = await run(vision.engine, request)
            assert again.cached == vision.whole(request.prompt)


async def test_prompts_with_images_continue_as_transformers_does_alone_and_together(
    vision: Vision,
) -> None:
    await prompts_continue_as_transformers_does(vision)


async def test_a_second_ask_finds_images_and_what_follows_in_the_cache(vision: Vision) -> None:
    prompt = vision.prompt(PROMPTS["both"])
    await vision.engine.reset_prefix_cache()
    first, second = await vision.ask(prompt), await vision.ask(prompt)
    assert (first.cached, second.cached) == (0, vision.whole(prompt))
    assert first.output == second.output
    # Another image of the same size at the same place is another prompt.
    parts = [part if part != ONE else Picture(7, 40, 56) for part in PROMPTS["both"]]
    other = await vision.ask(vision.prompt(parts))
    assert other.cached < vision.block
    assert other.output == vision.wanted(parts)


async def test_tenants_do_not_share_an_image(vision: Vision) -> None:
    prompt = vision.prompt(PROMPTS["one"])
    await vision.engine.reset_prefix_cache()
    found = [await vision.ask(prompt, salt=salt) for salt in ("a", "b", "a")]
    assert [one.cached for one in found] == [0, 0, vision.whole(prompt)]
    assert {tuple(one.output) for one in found} == {tuple(vision.wanted(PROMPTS["one"]))}
    media = vision.engine._running.media
    assert media is not None
    names = []
    for salt in ("a", "b", "a"):
        (given, _) = await media.input_of(make_request("x", prompt, salt=salt))
        names.append(given["mm_hashes"]["image"][0])
    assert names[0] == names[2] != names[1]


async def test_an_image_of_low_detail_is_another_than_the_same_file_of_high(
    vision: Vision,
) -> None:
    """Of the smallest models both are as large, and so the answer is the same."""
    prompt = vision.prompt(PROMPTS["one"], detail="low")
    found = await vision.ask(prompt)
    assert found.output == vision.wanted(PROMPTS["one"])
    assert (await vision.ask(prompt)).cached == vision.whole(prompt)


async def test_rows_of_a_clients_own_encoder_are_the_image_and_mix_with_files_and_rows(
    vision: Vision,
) -> None:
    await mixtures_continue_as_transformers_does(vision)


async def test_routers_hear_of_images_and_rows_what_vllm_finds_again(vision: Vision) -> None:
    told = Told(EngineHost(vision.engine))
    await vision.engine.reset_prefix_cache()
    await told.until(lambda keys: not keys)
    text = Prompt.of(Tokens(range(3, 43)))
    forms = {
        "text": (text, None, 0),
        "images": (vision.prompt(PROMPTS["both"]), None, 0),
        "images of a tenant": (vision.prompt(PROMPTS["both"]), "mine", 0),
        "twice": (vision.prompt(PROMPTS["twice"]), None, 0),
        "embeds": (Prompt.of(Tokens(range(9, 22)), *vision.embeds(ONE), Tokens([5] * 20)), None, 0),
        # What a text left serves a prompt that goes on with rows, and with an image.
        "rows": (text + Prompt.of(vision.rows(list(range(50, 90)))), None, vision.block),
        "text and image": (text + vision.prompt([ONE, [7] * 9]), None, vision.block),
    }
    stored: set[bytes] = set()
    for name, (prompt, salt, cached) in forms.items():
        whole = with_digests(prompt, SECRET)
        found = await vision.ask(whole, name, salt=salt)
        assert found.cached == cached, name
        stored |= whole_blocks(told.host, whole, found, salt)
        await told.until(lambda keys: keys == stored)  # noqa: B023
    for name, (prompt, salt, _) in forms.items():
        again = await vision.ask(with_digests(prompt, SECRET), name, salt=salt)
        assert again.cached == vision.whole(prompt), name


def _lying(prompt: Prompt, **changes: Any) -> Prompt:
    """The prompt with another first run of its image."""
    return Prompt(
        tuple(
            msgspec.structs.replace(each, **changes) if isinstance(each, Media) else each
            for each in prompt.segments
        )
    )


def _scratched(data: bytes) -> bytes:
    """A file of the right size and shape whose pixels cannot be unpacked."""
    return data[:60] + bytes(200) + data[260:]


async def test_what_does_not_fit_is_refused_before_vllm_sees_it_and_neighbours_go_on(
    vision: Vision,
) -> None:
    good = vision.prompt(PROMPTS["other"])
    wanted = vision.wanted(PROMPTS["other"])
    run_of = next(each for each in good.segments if isinstance(each, Media))
    bad = {
        "has no data": _lying(good, data=None),
        "a part of an image": _lying(good, total=run_of.total + 4),
        "it is truncated": _lying(good, data=Buffer(ONE.data[:900]), digest=bytes(16)),
        "cannot be decoded": _lying(good, data=Buffer(_scratched(ONE.data)), digest=bytes(16)),
        "has room for": _lying(good, data=Buffer(Picture(1, 90, 8).data), digest=bytes(16)),
    }
    if not vision.spec.mrope:  # all its images are of the same size
        del bad["has room for"]
    for said, prompt in bad.items():
        refused, neighbour = await run(
            vision.engine, make_request("bad", prompt), make_request("good", good, NEW)
        )
        assert refused.last.error is not None
        assert said in refused.last.error.message
        assert refused.last.error.kind == "InvalidRequestError"
        assert neighbour.output == wanted


async def test_rows_of_an_image_must_fill_their_grid(vision: Vision) -> None:
    if not vision.spec.mrope:
        pytest.skip("this family has no grid")
    (rows,) = vision.embeds(ONE)
    assert isinstance(rows, Rows)
    (grid,) = rows.bundle
    assert grid.name == GRID_FIELD
    cells = np.frombuffer(grid.data.view, "<i4").reshape(-1, 3)
    for wrong in (cells[::-1], cells * 2, np.where(cells == cells.max(), 40_000, cells)):
        field = RowField(
            GRID_FIELD, Buffer(np.ascontiguousarray(wrong).tobytes()), "int32", grid.shape
        )
        prompt = Prompt.of(Tokens([5]), msgspec.structs.replace(rows, bundle=(field,)), Tokens([6]))
        found = await vision.ask(prompt)
        assert found.last.error is not None
        assert "do not fill a grid" in found.last.error.message
    short = rows.slice(0, len(rows) - 2)
    found = await vision.ask(Prompt.of(short))
    assert found.last.error is not None
    assert found.last.error.kind == "InvalidRequestError"
    narrow = Rows(rows.data, "float32", (2 * len(rows), rows.shape[1] // 2))
    with pytest.raises(InvalidRequestError, match="size of tensor must match"):
        vision.engine.submit(make_request("narrow", Prompt.of(narrow)), lambda _: None)


async def test_an_image_that_vllm_would_lay_out_otherwise_is_refused(vision: Vision) -> None:
    media = vision.engine._running.media
    assert media is not None
    media.check()
    spec, prompt = media.spec, vision.prompt(PROMPTS["one"])
    assert spec.image is not None
    more = {"rows": 15} if not spec.mrope else {"max_pixels": 16 * 16, "min_pixels": 1}
    media.spec = msgspec.structs.replace(spec, image=msgspec.structs.replace(spec.image, **more))
    try:
        with pytest.raises(EngineError, match="vLLM lays an image out as"):
            media.check()
        found = await vision.ask(images.prompt_of(media.spec, PROMPTS["one"]))
        assert found.last.error is not None
        assert "vLLM lays an image out as" in found.last.error.message
    finally:
        media.spec = spec
    assert (await vision.ask(prompt)).output == vision.wanted(PROMPTS["one"])


async def test_a_request_that_is_stopped_while_its_image_is_read_leaves_nothing(
    vision: Vision,
) -> None:
    receivers = []
    for number in range(6):
        request: Request = make_request(
            f"gone {number}", vision.prompt([[5], Picture(50 + number, 64, 64), [6]])
        )
        receiver = Receiver(request)
        vision.engine.submit(request, receiver)
        receivers.append(receiver)
        await asyncio.sleep(0.004 * number)
        vision.engine.abort(request.id)
        assert receiver.last.finish_reason == "abort"
    again = await run(vision.engine, *(one.request for one in receivers))
    assert all(one.last.finish_reason == "length" for one in again)
    assert vision.engine.stats().running == 0
