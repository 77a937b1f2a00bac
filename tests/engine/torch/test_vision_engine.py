"""Images through the torch engine itself: files in, tokens and logits of `transformers` out."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.engine import TorchEngine
from inlay.media.items import audio_item, video_item
from inlay.media.spec import layout, media_segments
from inlay.messages.digest import Secret, media_digest
from inlay.messages.prompt import Buffer, Media, Prompt, Segment, Tokens
from inlay.messages.request import Output, Request, Sampling
from tests import adapters
from tests.audio_models import AUDIO_FAMILIES
from tests.engine.adapter_conformance import load
from tests.engine.torch.vision_reference import (
    OMNI_CASES,
    VIDEO_CASES,
    Clip,
    Item,
    Parts,
    Picture,
    Sound,
    directory_of,
    encode_of,
    generated,
    spec,
    surrounded,
)
from tests.omni_models import whole
from tests.vision_models import FAMILIES, vision

NEW = 6
ONE, TWO = Picture(3, 50, 60), Picture(4, 33, 70)
PARTS: Parts = [[5, 6, 9, 10], ONE, [11, 12, 13, 14, 15], TWO, list(range(60, 80))]
SECRET = Secret(bytes(32))


@asynccontextmanager
async def started(family: str, **settings: object) -> AsyncIterator[TorchEngine]:
    # Gemma 4 cuts no image, and its images have up to 70 rows.
    chunk = 80 if family == "gemma4" else 29
    values = {"device": "cpu", "num_threads": 1, "max_num_batched_tokens": chunk, **settings}
    engine = TorchEngine(
        EngineSettings.of(**{"model": str(directory_of(family)), **values}), SECRET
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def segments(engine: TorchEngine, item: Item, data: bytes | None = None) -> list[Segment]:
    media = engine.card.media
    assert media is not None
    file = Buffer(item.data if data is None else data)
    if isinstance(item, Sound):
        return list(audio_item(media, file, SECRET).segments)
    if isinstance(item, Clip):
        return list(video_item(media, file, SECRET, encode_of(media.family)).segments)
    digest = media_digest(file.view, SECRET, kind="image", encoder_id=media.encoder_id)
    laid = layout(media, item.height, item.width)
    return media_segments(laid, digest, file, atomic=media.atomic)


def prompt_of(engine: TorchEngine, parts: Parts) -> Prompt:
    return Prompt.of(
        *(
            segment
            for part in parts
            for segment in ([Tokens(part)] if isinstance(part, list) else segments(engine, part))
        )
    )


async def answer(
    engine: TorchEngine,
    prompt: Prompt,
    name: str = "one",
    salt: str | None = None,
    adapter: str | None = None,
) -> list[Output]:
    sampling = Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True, logprobs=20)
    outputs: list[Output] = []
    done = asyncio.Event()

    def emit(output: Output) -> None:
        outputs.append(output)
        if output.finish_reason is not None:
            done.set()

    request = Request(id=name, prompts=(prompt,), params=sampling, salt=salt, adapter=adapter)
    engine.submit(request, emit)
    async with asyncio.timeout(60):
        await done.wait()
    return outputs


def check(family: str, outputs: list[Output], parts: Parts = PARTS, model: Any = None) -> None:
    assert outputs[-1].error is None, outputs[-1].error
    truth = generated(family, parts, NEW, model)
    assert [id_ for output in outputs for id_ in output.token_ids] == truth.ids
    told = [logprobs for output in outputs for logprobs in output.logprobs]
    top = torch.tensor([[id_ for id_, _ in each.top] for each in told])
    found = torch.tensor([[value for _, value in each.top] for each in told])
    expected = truth.logits.log_softmax(-1).gather(1, top)
    assert float((found - expected).abs().max()) < 2e-4


def parts_of(case: str) -> Parts:
    """`PARTS` with the items of a case."""
    one: Item = ONE
    two: Item = TWO
    if case in AUDIO_FAMILIES:
        one, two = Sound(3, 20_001), Sound(4, 7_000)
    elif case in VIDEO_CASES:
        one, two = Clip(3, 3, 50, 60), Clip(4, 4, 33, 70, fps=3)
    elif case == "qwen2_5_omni+mixed":
        one, two = Clip(3, 3, 50, 60, fps=3), Sound(3, 20_001)
    parts = [one if part is ONE else two if part is TWO else part for part in PARTS]
    return surrounded(parts) if case in OMNI_CASES else parts


@pytest.mark.thorough
@pytest.mark.parametrize("family", [*FAMILIES, *AUDIO_FAMILIES, *VIDEO_CASES, *OMNI_CASES])
async def test_files_in_a_prompt_give_what_transformers_generates(family: str) -> None:
    parts = parts_of(family)
    async with started(family) as engine:
        assert engine.card.media is not None
        assert engine.card.media.family == spec(family).family
        prompt = prompt_of(engine, parts)
        together = await asyncio.gather(*(answer(engine, prompt, name) for name in ("a", "b")))
        for outputs in together:
            check(family, outputs, parts)
        images = engine.encoder
        assert images is not None
        assert images.encoded == 2
        await engine.reset_prefix_cache()
        check(family, await answer(engine, prompt), parts)
        # The prefix is lost, the rows are not.
        assert images.encoded == 2
        assert images.cache.hits == 2


@contextmanager
def busy(engine: TorchEngine) -> Iterator[None]:
    """Keep the only thread that runs towers busy."""
    assert engine.encoder is not None
    over = threading.Event()
    engine.encoder._encoder.submit(over.wait)
    try:
        yield
    finally:
        over.set()


def damaged(data: bytes) -> bytes:
    """A PNG whose pixels are cut, with a sound header and end."""
    start = data.index(b"IDAT") - 4
    return data[: start + 4] + b"IDAT" + bytes(len(data) - start - 8 - 12) + data[-12:]


async def test_a_file_that_cannot_be_decoded_ends_its_request_alone() -> None:
    async with started("llava") as engine:
        bad = Prompt.of(Tokens([5]), *segments(engine, ONE, damaged(ONE.data)), Tokens([6]))
        broken, good = await asyncio.gather(
            answer(engine, bad, "bad"), answer(engine, prompt_of(engine, PARTS), "good")
        )
        error = broken[-1].error
        assert error is not None
        assert error.kind == "InvalidRequestError"
        assert error.message.startswith("an image cannot be decoded: ")
        check("llava", good)


async def test_a_file_of_another_size_than_the_prompt_was_laid_out_for_is_refused() -> None:
    async with started("qwen2_vl") as engine:
        wrong = Prompt.of(Tokens([5]), *segments(engine, ONE, TWO.data))
        (output,) = await answer(engine, wrong)
        assert output.error is not None
        assert output.error.message == (
            "an image of 70 x 33 pixels has 36 rows; the prompt has room for 30"
        )


async def test_media_for_another_family_or_kind_are_refused_when_they_are_submitted() -> None:
    async with started("qwen2_vl", max_num_batched_tokens=64) as engine:
        (image,) = (part for part in segments(engine, ONE) if isinstance(part, Media))
        params = Sampling(max_tokens=1)
        for run, message in (
            (replace(image, grid=None), "laid out for another family than 'qwen2_vl'"),
            (replace(image, atomic=True), "laid out for another family than 'qwen2_vl'"),
            (replace(image, kind="audio"), "cannot read audio"),
        ):
            request = Request(id="a", prompts=(Prompt.of(Tokens([1]), run),), params=params)
            with pytest.raises(InvalidRequestError, match=message):
                engine.submit(request, print)
        uneven = replace(image, grid=(1, 6, 14))
        (output,) = await answer(engine, Prompt.of(Tokens([1]), uneven))
        assert output.error is not None
        assert output.error.message == "a grid of 1 x 6 x 14 patches has 30 rows"


async def test_only_requests_of_one_salt_share_encoded_images() -> None:
    async with started("llava", enable_prefix_caching=False) as engine:
        assert engine.encoder is not None
        prompt = prompt_of(engine, PARTS)
        for salt, encoded in (("a", 2), ("b", 4), ("a", 4), (None, 6)):
            check("llava", await answer(engine, prompt, salt=salt))
            assert engine.encoder.encoded == encoded
        stats = engine.stats()
        assert (stats.image_cache_misses, stats.image_cache_hits) == (6, 2)
        assert stats.image_cache_bytes > 6 * 16 * 64 * 4


async def test_images_that_are_not_kept_are_encoded_again_and_the_answers_stay() -> None:
    async with started("qwen3_vl", enable_prefix_caching=False, encoder_cache_bytes=0) as engine:
        assert engine.encoder is not None
        for encoded in (2, 4):
            check("qwen3_vl", await answer(engine, prompt_of(engine, PARTS)))
            assert engine.encoder.encoded == encoded
        assert engine.stats().image_cache_bytes == 0


async def test_an_aborted_request_leaves_nothing_and_others_that_share_its_image_go_on() -> None:
    async with started("llava") as engine:
        prompt = prompt_of(engine, PARTS)
        ended: list[Output] = []
        params = Sampling(max_tokens=NEW)
        with busy(engine):
            engine.submit(Request(id="first", prompts=(prompt,), params=params), ended.append)
            other = asyncio.create_task(answer(engine, prompt, "second"))
            await asyncio.sleep(0.1)
            engine.abort("first")
            await asyncio.sleep(0.1)
            assert [output.finish_reason for output in ended] == ["abort"]
        check("llava", await other)
        assert not engine._needs.unmet
        assert engine.stats().blocks_used == 0


@pytest.mark.thorough
async def test_images_survive_a_sleep() -> None:
    async with started("qwen2_5_vl") as engine:
        prompt = prompt_of(engine, PARTS)
        check("qwen2_5_vl", await answer(engine, prompt))
        await engine.sleep(1)
        assert engine.encoder is None
        assert await engine.wake_up(())
        check("qwen2_5_vl", await answer(engine, prompt))
        assert engine.stats().image_cache_misses == 4


async def test_a_deadline_passes_while_an_image_is_encoded() -> None:
    async with started("llava") as engine:
        ended: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        request = Request(
            id="late",
            prompts=(prompt_of(engine, PARTS),),
            params=Sampling(max_tokens=1),
            deadline=0.1,
        )
        with busy(engine):
            engine.submit(request, ended.set_result)
            output = await ended
        assert output.error is not None
        assert output.error.kind == "DeadlineExceededError"


async def test_a_directory_without_an_image_processor_serves_text(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(vision("llava"), directory)
    (directory / "preprocessor_config.json").unlink()
    async with started("llava", model=str(directory)) as engine:
        assert engine.card.media is None
        text: Parts = [list(range(40, 60))]
        check("llava", await answer(engine, prompt_of(engine, text)), text)


def renamed(lora: Path, to: Path, outer: str, *, keep: bool = False) -> Path:
    """A LoRA whose modules are named as older libraries did, `outer` before `layers`."""
    shutil.copytree(lora, to)
    file = to / "adapter_model.safetensors"
    stored = load_file(file)
    older = {
        f"base_model.model.{outer}layers.{name.partition('layers.')[2]}": tensor.clone()
        for name, tensor in stored.items()
    }
    save_file({**stored, **older} if keep else older, file)
    return to


@pytest.mark.parametrize("family", ["llava", "smolvlm", "qwen2_5_vl", "qwen3_vl"])
async def test_an_adapter_of_the_language_model_decodes_as_pefts_merged_model_does(
    family: str, tmp_path: Path
) -> None:
    kind = transformers.AutoModelForImageTextToText
    base = partial(kind.from_pretrained, vision(family), dtype=torch.float32)
    language = r".*(language|text)_model\..*(q_proj|v_proj|down_proj)"
    lora = adapters.make_lora(tmp_path / "lora", vision(family), targets=language, base=base)
    merged = adapters.merged_from(base, lora)
    async with started(family, enable_lora=True, max_lora_rank=8) as engine:
        await load(engine, "a", lora)
        prompt = prompt_of(engine, PARTS)
        check(family, await answer(engine, prompt))
        check(family, await answer(engine, prompt, adapter="a"), model=merged)
        for age, older in enumerate(("", "language_model.model.", "model.", "language_model.")):
            path = renamed(lora, tmp_path / f"older {age}", older)
            await load(engine, "older", path)
            check(family, await answer(engine, prompt, adapter="older"), model=merged)
            await engine.unload_adapter("older")
        both = renamed(lora, tmp_path / "both", "model.", keep=True)
        with pytest.raises(InvalidRequestError, match="two names for one module"):
            await load(engine, "both", both)
        tower = adapters.make_lora(
            tmp_path / "tower",
            vision(family),
            targets=r".*(vision|visual).*(q_proj|qkv)",
            base=base,
        )
        with pytest.raises(InvalidRequestError, match="modules that this model does not have"):
            await load(engine, "b", tower)


@pytest.mark.parametrize("family", ["llava", "internvl", "gemma3", "qwen2_5_vl", "qwen3_vl"])
async def test_bfloat16_is_near_float32(family: str) -> None:
    text = next(part for part in PARTS if not isinstance(part, Picture))
    async with started(family, dtype="bfloat16") as engine:
        outputs = await answer(engine, prompt_of(engine, PARTS))
        assert outputs[-1].error is None
        first = next(output for output in outputs if output.logprobs).logprobs[0]
        found = torch.tensor([value for _, value in first.top])
        index = torch.tensor([id_ for id_, _ in first.top])
        expected = generated(family, PARTS, NEW).logits[0].log_softmax(-1)
        without = generated(family, [text], NEW).logits[0].log_softmax(-1)
        error = (found - expected[index]).abs().mean() / expected.std()
        assert error < 0.12
        # Other rows or positions are much further away.
        assert (without - expected).abs().mean() / expected.std() > 0.5


async def test_a_thinker_that_was_saved_alone_is_served_as_the_whole_model(tmp_path: Path) -> None:
    case = "qwen2_5_omni+mixed"
    whole().thinker.save_pretrained(tmp_path)
    for file in directory_of(case).iterdir():
        if "processor" in file.name or "token" in file.name:
            (tmp_path / file.name).symlink_to(file)
    async with started(case, model=str(tmp_path)) as engine:
        assert engine.card.media is not None
        assert engine.card.media.family == "qwen2_5_omni"
        parts = parts_of(case)
        check(case, await answer(engine, prompt_of(engine, parts)), parts)
