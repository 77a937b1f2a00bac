"""`EncodeEngine`: rows of images without the language model, each request for itself."""

import asyncio

import numpy as np
import pytest
import torch

from inlay.base.errors import EngineError, InvalidRequestError, OverloadedError
from inlay.engine import create
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.media.engine import EncodeEngine
from inlay.engine.torch.media.loading import encoder_of
from inlay.engine.torch.model import CausalModel
from inlay.media.positions import rope_positions
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer, Media, Prompt, RowField, Rows, Tokens
from inlay.messages.request import Output
from tests.audio_models import audio
from tests.engine.torch.encode_reference import (
    SECRET,
    answer,
    arrays,
    damaged,
    encoding,
    features,
    prompt_of,
    request_of,
    settings,
)
from tests.engine.torch.vision_reference import Picture
from tests.models import tiny
from tests.vision_models import FAMILIES, vision

ONE, TWO = Picture(3, 50, 60), Picture(4, 33, 70)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2_5_omni"])
async def test_rows_are_the_generating_engines_bit_for_bit_and_those_of_transformers(
    family: str,
) -> None:
    generating = TorchEngine(settings(family, task="generate"), SECRET)
    async with encoding(family) as engine:
        await generating.start()
        try:
            assert engine.card.media == generating.card.media
            assert engine.card.weights_id == generating.card.weights_id
            prompts = [prompt_of(engine, picture.data) for picture in (ONE, TWO)]
            # One after another: what is computed together decides the rounding.
            found = [
                arrays(await answer(engine, request_of("one", prompt)))[0] for prompt in prompts
            ]
            together = arrays(await answer(engine, request_of("both", *prompts)))
            assert [ports["embeddings"].tobytes() for ports in together] == [
                ports["embeddings"].tobytes() for ports in found
            ]
            assert generating.encoder is not None
            for picture, prompt, ports in zip((ONE, TWO), prompts, found, strict=True):
                run = next(part for part in prompt.segments if isinstance(part, Media))
                rows = await generating.encoder.rows(run)
                assert ports["embeddings"].tobytes() == bytes(rows.data.view)
                (same,) = arrays(await answer(generating, request_of("one", prompt)))
                assert {port: array.tobytes() for port, array in same.items()} == {
                    port: array.tobytes() for port, array in ports.items()
                }
                truth = features(family, picture)
                torch.testing.assert_close(
                    torch.tensor(ports["embeddings"]), truth.rows, atol=2e-5, rtol=1e-4
                )
                for level, expected in enumerate(truth.levels):
                    torch.testing.assert_close(
                        torch.tensor(ports[f"deepstack.{level}"]), expected, atol=2e-5, rtol=1e-4
                    )
                names = {
                    "embeddings",
                    *(f"deepstack.{level}" for level in range(len(truth.levels))),
                }
                assert ports.keys() == names | ({"grid"} if run.grid else set())
        finally:
            await generating.close()


async def test_the_grid_places_rows_where_the_image_itself_has_its_positions() -> None:
    async with encoding("qwen2_vl") as engine:
        prompt = prompt_of(engine, ONE.data)
        (ports,) = arrays(await answer(engine, request_of("one", prompt)))
        data, grid = ports["embeddings"], ports["grid"]
        field = RowField("grid", Buffer(grid.tobytes()), "int32", grid.shape)
        rows = Rows(Buffer(data.tobytes()), "float32", data.shape, (field,))
        tail = Tokens(range(5))
        expected, delta = rope_positions(Prompt.of(*prompt.segments, tail))
        begin = [part for part in prompt.segments if isinstance(part, Tokens)]
        given, same = rope_positions(Prompt.of(*begin[:1], rows, *begin[1:], tail))
        assert np.array_equal(expected, given)
        assert delta == same


async def test_no_layer_of_the_language_model_is_loaded() -> None:
    async with encoding("llava") as engine:
        tower = engine._started.encoder._tower
        assert tower is not None
        names = [name for name, _ in tower.body.named_parameters()]
        assert names
        assert all(name.startswith(("vision_tower.", "multi_modal_projector.")) for name in names)


async def test_many_requests_at_once_have_the_rows_of_their_own_images() -> None:
    async with encoding("internvl") as engine:
        prompts = [prompt_of(engine, Picture(seed, 40, 56).data) for seed in range(24)]
        outputs = await asyncio.gather(
            *(
                answer(engine, request_of(str(index), prompt))
                for index, prompt in enumerate(prompts)
            )
        )
        for seed in (0, 11, 23):
            alone = arrays(outputs[seed])[0]["embeddings"]
            truth = features("internvl", Picture(seed, 40, 56)).rows
            torch.testing.assert_close(torch.tensor(alone), truth, atol=2e-5, rtol=1e-4)
        rows = {arrays(output)[0]["embeddings"].tobytes() for output in outputs}
        assert len(rows) == 24
        stats = engine.stats()
        assert stats.image_cache_misses == 24
        assert stats.progress == 24 * 20
        assert stats.running == 0


async def test_an_image_is_encoded_once_for_one_salt() -> None:
    async with encoding("llava") as engine:
        prompt = prompt_of(engine, ONE.data)
        first = await answer(engine, request_of("a", prompt, salt="x"))
        assert await answer(engine, request_of("a", prompt, salt="x")) == first
        assert (engine.stats().image_cache_misses, engine.stats().image_cache_hits) == (1, 1)
        await answer(engine, request_of("a", prompt, salt="y"))
        assert engine.stats().image_cache_misses == 2


async def test_a_damaged_file_ends_its_own_request_alone() -> None:
    async with encoding("llava") as engine:
        good = prompt_of(engine, ONE.data)
        bad = prompt_of(engine, damaged(TWO.data))
        found, failed, mixed = await asyncio.gather(
            *(
                answer(engine, request_of(name, *prompts))
                for name, prompts in (("a", [good]), ("b", [bad]), ("c", [good, bad]))
            )
        )
        assert len(arrays(found)) == 1
        for output in (failed, mixed):
            assert output.finish_reason == "error"
            assert output.error is not None
            assert "an image cannot be decoded" in output.error.message
        assert engine.stats().running == 0


async def test_the_deadline_and_abort_end_a_request() -> None:
    async with encoding("llava") as engine:
        prompt = prompt_of(engine, ONE.data)
        late = await answer(engine, request_of("late", prompt, deadline=0.0))
        assert late.error is not None
        assert late.error.kind == "DeadlineExceededError"
        ended: list[Output] = []
        engine.submit(request_of("gone", prompt), ended.append)
        engine.abort("gone")
        engine.abort("unknown")
        assert [output.finish_reason for output in ended] == ["abort"]
        assert engine.stats().running == 0
        assert await engine.probe() > 0


async def test_an_encoder_of_audio_alone_is_probed_with_silence() -> None:
    async with encoding("llava", model=str(audio("qwen2_audio"))) as engine:
        assert await engine.probe() > 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([Tokens((1, 2))], "one has 0 items"),
        ([Rows(Buffer(bytes(256)), "float32", (1, 64))], "has no language model"),
        ([Media("audio", bytes(16), 4, Buffer(b"x"))], "cannot read audio"),
        ([Media("image", bytes(16), 4, Buffer(b"x"), grid=(1, 4, 4))], "for another family"),
        (
            [Media("image", bytes([index] * 16), 4, Buffer(b"x")) for index in (1, 2)],
            "one has 2 items",
        ),
    ],
)
async def test_what_is_not_one_image_is_refused(
    prompt: list[Tokens | Rows | Media], message: str
) -> None:
    async with encoding("llava") as engine:
        with pytest.raises(InvalidRequestError, match=message):
            await answer(engine, request_of("one", Prompt.of(*prompt)))
        with pytest.raises(InvalidRequestError, match="does not encode media"):
            await answer(engine, request_of("x", prompt_of(engine, ONE.data), adapter="lora"))


async def test_a_closed_or_new_engine_takes_no_request() -> None:
    engine = EncodeEngine(settings("llava"), SECRET)
    with pytest.raises(EngineError, match="not started"):
        engine.card  # noqa: B018  # the property raises
    await engine.start()
    with pytest.raises(EngineError, match="started before"):
        await engine.start()
    request = request_of("one", prompt_of(engine, ONE.data))
    await engine.close()
    with pytest.raises(OverloadedError, match="closing"):
        engine.submit(request, print)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": str(tiny("llama"))}, "no encoder of images: --task encode serves gemma3"),
        ({"model": str(vision("llava")), "enable_lora": True}, "does not load"),
        ({"model": str(vision("llava")), "engine": "vllm"}, "--task encode is for the torch"),
    ],
)
async def test_what_cannot_encode_is_refused_before_it_is_loaded(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await create(EngineSettings.of(**{"task": "encode", **values}), Secret(bytes(32))).start()


@pytest.mark.parametrize(
    ("family", "given", "processing"),
    [
        ("qwen2_5_vl", '{"max_pixels": 1024}', {"size": {"shortest_edge": 256, "longest_edge": 1024}}),
        ("internvl", '{"max_patches": 2}', {"max_patches": 2}),
    ],
)  # fmt: skip
async def test_settings_of_the_processor_are_those_of_transformers(
    family: str, given: str, processing: dict[str, object]
) -> None:
    async with (
        encoding(family, mm_processor_kwargs=given) as engine,
        encoding(family) as plain,
    ):
        prompts = [prompt_of(each, ONE.data) for each in (engine, plain)]
        ((ports,), (own,)) = [
            arrays(await answer(each, request_of("one", prompt)))
            for each, prompt in zip((engine, plain), prompts, strict=True)
        ]
        truth = features(family, ONE, **processing).rows.numpy()
        np.testing.assert_allclose(ports["embeddings"], truth, atol=2e-5, rtol=1e-4)
        assert len(truth) < len(own["embeddings"])
        assert engine.card.media is not None
        assert plain.card.media is not None
        assert engine.card.media.encoder_id != plain.card.media.encoder_id
    with pytest.raises(InvalidRequestError, match="is not told image_mean"):
        await EncodeEngine(
            settings(family, mm_processor_kwargs='{"image_mean": [0]}'), SECRET
        ).start()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_language_model_is_loaded_without_its_tower(family: str) -> None:
    values = {"task": "generate", "language_model_only": True}
    alone = CausalModel.load(settings(family, **values))
    whole = CausalModel.load(settings(family, task="generate"))
    assert alone.takes_media
    assert alone.tower is None
    names = [name for name, _ in whole._model.named_parameters()]
    assert [name for name, _ in alone._model.named_parameters()] == names
    spec, both = (
        encoder_of(settings(family, **some), model)
        for some, model in ((values, alone), ({"task": "generate"}, whole))
    )
    assert spec is not None
    assert both is not None
    assert spec.spec == both.spec
    assert (spec.dtype, spec.hidden_size) == (both.dtype, both.hidden_size)
