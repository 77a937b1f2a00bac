"""Vectors of prompts with images, audio and video: transformers' own states, pooled the same way."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from inlay import engine as engines
from inlay.base.errors import InvalidRequestError, OverloadedError
from inlay.engine.api import Engine
from inlay.engine.embed.families import FAMILIES, family_of
from inlay.engine.settings import EngineSettings
from inlay.messages.prompt import Buffer, Media, Prompt, Tokens
from inlay.messages.request import Output
from inlay.tensors.checkpoint import config_of
from tests.audio_models import AUDIO_FAMILIES
from tests.embedding_reference import cosine
from tests.engine.embed_conformance import SECRET, Waiting, rows_from, to_embed
from tests.engine.torch.vision_reference import (
    VIDEO_CASES,
    Clip,
    Item,
    Parts,
    Picture,
    Sound,
    directory_of,
    model_of,
    prompt_of,
    states_of,
)
from tests.vision_models import FAMILIES as VISION_FAMILIES
from tests.vision_models import vision

ONE, TWO = Picture(1, 40, 56), Picture(2, 70, 33)
SOUNDS = Sound(1, 18_003), Sound(2, 9_000)
CLIPS = Clip(1, 5, 40, 56), Clip(2, 4, 70, 33, fps=1.5)

CASES = tuple(
    case
    for case in (*VISION_FAMILIES, *AUDIO_FAMILIES, *VIDEO_CASES)
    if not case.startswith(("gemma4", "qwen3_5"))
)


def items(case: str) -> tuple[Item, Item]:
    if case in AUDIO_FAMILIES:
        return SOUNDS
    return CLIPS if case in VIDEO_CASES else (ONE, TWO)


def prompts(case: str) -> list[Parts]:
    one, two = items(case)
    return [
        [list(range(100, 117)), one, [11, 12, 13], two, [20, 21, 22]],
        [[5, 6, 9, 10], one, list(range(60, 80))],
        [[40, 41, 42, 43, 44, 45, 46, 47, 48]],
        [[7], two, [90, 91]],
        # Attended together with the one before, and padded.
        [[7], one, [90, 91, 92]],
    ]


@asynccontextmanager
async def running(directory: Path, **options: Any) -> AsyncIterator[Engine]:
    settings = EngineSettings.of(
        model=str(directory), task="embed", device="cpu", num_threads=1, **options
    )
    engine = engines.create(settings, SECRET)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def vectors(answer: Output) -> npt.NDArray[np.float32]:
    assert answer.error is None, answer.error
    (payload,) = answer.payloads
    return np.frombuffer(payload.data.view, np.float32).reshape(payload.shape)


def assert_same(found: npt.NDArray[np.float32], expected: torch.Tensor) -> None:
    wanted = expected.numpy()
    assert cosine(found, wanted) > 0.999999
    assert np.abs(found - wanted).max() < 2e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("case", CASES)
async def test_vectors_of_prompts_with_media_are_the_last_states_of_transformers(case: str) -> None:
    given = prompts(case)
    async with running(directory_of(case)) as engine:
        request = to_embed("a", *(prompt_of(case, parts) for parts in given))
        found = vectors(await Waiting(engine, request).answer())
    for vector, parts in zip(found, given, strict=True):
        assert_same(vector, states_of(case, parts)[-1])
    # Another picture, or none, is another vector: these models tell.
    assert cosine(found[1], found[3]) < 0.99


def test_every_family_that_embeds_media_is_tested() -> None:
    tested = {config_of(directory_of(case))["model_type"] for case in CASES}
    tested.add("colqwen2")  # in test_pages
    assert tested == {name for name, family in FAMILIES.items() if family.language is not None}


@pytest.mark.parametrize("case", ["llava", "qwen2_vl", "qwen3_vl"])
async def test_text_rows_and_images_mix_and_are_pooled_as_the_settings_say(case: str) -> None:
    tokens = [20, 21, 22, 23, 24]
    table = model_of(vision(case)).get_input_embeddings().weight.detach()
    rows = rows_from(table[tokens].numpy())
    given: Parts = [[5, 6], ONE, tokens, TWO, [9]]
    whole = prompt_of(case, given)
    # The same prompt with rows in place of the ids in its middle.
    middle = next(
        index
        for index, segment in enumerate(whole.segments)
        if isinstance(segment, Tokens) and list(segment.ids)[-5:] == tokens
    )
    before = whole.segments[middle].slice(0, len(whole.segments[middle]) - 5)
    mixed = Prompt.of(*whole.segments[:middle], before, rows, *whole.segments[middle + 1 :])
    assert len(mixed) == len(whole)
    async with running(vision(case), pooling="mean") as engine:
        found = vectors(await Waiting(engine, to_embed("a", mixed, whole)).answer())
        assert engine.stats().image_cache_misses == 2
    for vector in found:
        assert_same(vector, states_of(case, given).mean(0))


def damaged(prompt: Prompt) -> Prompt:
    """The prompt with the end of its image's file cut off."""
    return Prompt.of(
        *(
            Media(
                segment.kind, bytes(16), len(segment), Buffer(bytes(segment.data.view[:-900])),
                grid=segment.grid, total=segment.total, param="messages[0].content[1]",
            )
            if isinstance(segment, Media) and segment.data is not None
            else segment
            for segment in prompt.segments
        )
    )  # fmt: skip


async def test_a_damaged_file_ends_its_request_and_disturbs_no_other() -> None:
    given: Parts = [[5, 6], ONE, [9, 10]]
    async with running(vision("llava")) as engine:
        whole = prompt_of("llava", given)
        good = Waiting(engine, to_embed("good", whole))
        bad = Waiting(engine, to_embed("bad", damaged(whole), prompt_of("llava", [[1, 2, 3]])))
        words = Waiting(engine, to_embed("words", prompt_of("llava", [[1, 2, 3]])))
        error = (await bad.answer()).error
        assert error is not None
        assert error.kind == "InvalidRequestError"
        assert error.param == "messages[0].content[1]"
        assert_same(vectors(await good.answer())[0], states_of("llava", given)[-1])
        assert_same(vectors(await words.answer())[0], states_of("llava", [[1, 2, 3]])[-1])


async def test_a_request_ends_while_its_image_is_encoded() -> None:
    async with running(vision("llava")) as engine:
        whole = prompt_of("llava", [[5, 6], ONE, [9, 10]])
        late = Waiting(engine, to_embed("late", whole, deadline=0.0))
        error = (await late.answer()).error
        assert error is not None
        assert error.kind == "DeadlineExceededError"
        gone = Waiting(engine, to_embed("gone", whole))
        engine.abort("gone")
        assert (await gone.answer()).finish_reason == "abort"
        again = Waiting(engine, to_embed("gone", whole))
        assert vectors(await again.answer()).shape == (1, 64)


async def test_media_waiting_to_be_encoded_count_against_the_queue() -> None:
    async with running(vision("llava"), max_num_queued_tokens=30) as engine:
        whole = prompt_of("llava", [[5, 6], ONE, [9, 10]])
        first = Waiting(engine, to_embed("a", whole))
        with pytest.raises(OverloadedError, match=r"20 positions wait .* limit of 30"):
            engine.submit(to_embed("b", whole), lambda _: None)
        assert vectors(await first.answer()).shape == (1, 64)


async def test_equal_images_are_encoded_once() -> None:
    async with running(vision("qwen2_vl")) as engine:
        for name in ("a", "b"):
            request = to_embed(
                name,
                prompt_of("qwen2_vl", [[5], ONE, [9], ONE]),
                prompt_of("qwen2_vl", [ONE, [1, 2]]),
            )
            vectors(await Waiting(engine, request).answer())
        stats = engine.stats()
        assert (stats.image_cache_misses, stats.image_cache_hits) == (1, 1)


def test_models_with_images_that_cannot_embed_are_refused_with_the_reason() -> None:
    with pytest.raises(InvalidRequestError, match="inside an image is bidirectional"):
        family_of(config_of(vision("gemma4")))
    with pytest.raises(InvalidRequestError, match="'cohere2', with which"):
        family_of({"model_type": "llava", "text_config": {"model_type": "cohere2"}})
