"""A worker is compared with the reference of its pool by requests, whatever engine it has."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from inlay import engine as engines
from inlay.base.errors import EngineError
from inlay.engine import references
from inlay.engine.api import Engine
from inlay.engine.echo import EchoEngine
from inlay.engine.pool_reference import BOUND, KEPT, PoolReference, key_of
from inlay.engine.references import LocalReferences
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.attention.native import NativeAttention
from inlay.engine.torch.attention.paged import Projection
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.native import kernels
from inlay.messages.card import ModelCard
from inlay.worker import pool_check
from inlay.worker.pool_check import check_pool
from tests.models import tiny
from tests.transport.fleet import SECRET


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this test's references are kept."""
    monkeypatch.setattr(references, "_path", lambda key: tmp_path / "kept" / f"{key}.msgpack")


@asynccontextmanager
async def serving(family: str = "qwen3", **more: Any) -> AsyncIterator[Engine]:
    given = {"dtype": "bfloat16", **more}
    settings = EngineSettings.of(model=str(tiny(family)), device="cpu", num_threads=1, **given)
    engine = engines.create(settings, SECRET)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def kept(engine: Engine) -> PoolReference:
    card = engine.card
    data = LocalReferences().find(key_of(card.weights_id, card.dtype))
    assert data is not None
    return PoolReference.decode(data, card.vocab_size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3_text", "qwen3_moe", "deepseek_v3"])
async def test_a_model_is_as_near_as_rounding(family: str, dtype: str) -> None:
    async with serving(family, dtype=dtype) as engine:
        reference = kept(engine)
        for answers in (
            await pool_check._answers(engine, reference),
            [await pool_check._beginnings(engine, ids) for _, ids in reference.prompts],
        ):
            distances = reference.distances(answers)
            assert set(distances) == {"random", "text"}
            assert max(distances.values()) <= 1.5
        assert await check_pool(engine, "strict", shared=True) is None


def _rolled(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = CausalModel.logits
    monkeypatch.setattr(
        CausalModel, "logits", lambda self, hidden, out=None: usual(self, hidden, out).roll(1, -1)
    )


async def test_one_that_differs_says_by_how_much_and_does_not_start_if_strict(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as engine:
        by = kept(engine).by
        _rolled(monkeypatch)
        found = await check_pool(engine, "start", shared=True)
        assert found is not None
        assert found.result == "differs"
        assert found.distance == max(found.distances.values()) > 10 * BOUND
        assert found.reference == f"{by}, kept"
        assert f"not those of {by} that workers of this model are held to" in found.reason
        assert found.reason in caplog.text
        with pytest.raises(EngineError, match="--self-check strict: its logprobs are not those of"):
            await check_pool(engine, "strict", shared=True)
        assert await check_pool(engine, "off", shared=True) is None
        # It has compared itself, and nobody else is there.
        assert await check_pool(engine, "start", shared=False) is None


async def test_who_gives_no_logprobs_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(max_logprobs=0) as engine:
        with caplog.at_level("INFO"):
            assert await check_pool(engine, "strict", shared=True) is None
        assert "or no logprobs" in caplog.text


class Decoding(EchoEngine):
    """An SGLang that only decodes, by its card: its prompts are computed elsewhere."""

    @property
    def card(self) -> ModelCard:
        return replace(super().card, engine="sglang", kv_rooms="mooncake", phase="decode")


@pytest.mark.parametrize("mode", ["start", "full", "strict"])
async def test_one_that_only_decodes_is_never_compared_and_starts_in_every_mode(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Decoding(EngineSettings.of(model=str(tiny("llama")), engine="echo"), SECRET)
    await engine.start()
    found = await check_pool(engine, mode, shared=True)
    assert found is not None
    assert found.result == "unchecked"
    assert "keys and values a prefill worker computes" in found.note
    assert found.note in caplog.text
    assert await check_pool(engine, "off", shared=True) is None
    await engine.close()


class CheckBefore(msgspec.Struct):
    """What frontends that know no note read of a check; they refuse one that has a reason."""

    result: str
    reason: str = ""


async def test_frontends_that_know_no_note_take_one_that_was_not_compared() -> None:
    engine = Decoding(EngineSettings.of(model=str(tiny("llama")), engine="echo"), SECRET)
    await engine.start()
    card = replace(engine.card, self_check=await check_pool(engine, "start", shared=True))
    await engine.close()
    read = msgspec.convert(msgspec.to_builtins(card)["self_check"], CheckBefore)
    assert read == CheckBefore("unchecked")


async def test_one_layer_whose_heads_are_exchanged_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    native = kernels()
    if native is None or not native.serve(torch.bfloat16):
        pytest.skip("no native kernels for bfloat16 here")
    async with serving() as engine:
        usual = NativeAttention.attend_projected

        def attend(self: Any, layer: int, projection: Projection, scoring: Any) -> torch.Tensor:
            found = usual(self, layer, projection, scoring)
            return found.flip(1) if layer == 1 else found

        monkeypatch.setattr(NativeAttention, "attend_projected", attend)
        found = await check_pool(engine, "start", shared=True)
        assert found is not None
        assert found.result == "differs"


async def test_numbers_that_are_none_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(dtype="float32") as engine:
        reference = kept(engine)
        answers = [{3: {5: math.nan, 6: -1.0}}, {3: {5: -1.0}}]
        check = pool_check._result(reference, reference.distances(answers), 0.0)
        assert (check.result, check.distance) == ("differs", -1.0)
        assert "not finite" in check.reason


async def test_a_reference_that_does_not_go_with_the_model_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as engine:
        reference, card = kept(engine), engine.card
        key = key_of(card.weights_id, card.dtype)
        for wrong in (b"", b"\xc0", replace(reference, noise=reference.noise[4:]).encode()):
            caplog.clear()
            LocalReferences().keep(key, wrong)
            assert await check_pool(engine, "start", shared=True) is None
            assert "is not used" in caplog.text
        with pytest.raises(ValueError, match="ids that the model does not have"):
            PoolReference.decode(reference.encode(), 9)
        nothing = replace(
            reference, logprobs=np.full(len(reference.ids) // 4, np.nan, "<f4").tobytes()
        )
        with pytest.raises(ValueError, match="numbers that are none"):
            PoolReference.decode(nothing.encode(), card.vocab_size)


def _made(noise: float, num: int = 3, routed: bool = False) -> PoolReference:
    values = -np.arange(1, KEPT + 1, dtype="<f4")
    return PoolReference(
        by="", dtype="bfloat16", prompts=(("text", (1,) * num),), routed=routed,
        ids=np.tile(np.arange(KEPT, dtype="<i4"), num).tobytes(),
        logprobs=np.tile(values, num).tobytes(), noise=np.full(num, noise, "<f4").tobytes(),
    )  # fmt: skip


@given(st.floats(0.001, 0.3), st.floats(0.0, 50.0))
def test_the_distance_is_error_over_noise(noise: float, times: float) -> None:
    shift = times * noise
    answer = {place: {id_: -id_ - 1.0 + shift for id_ in range(20)} for place in range(3)}
    found = _made(noise).distances([answer])["text"]
    assert found == pytest.approx((shift + 0.01) / (noise + 0.01), rel=0.02, abs=0.02)


def test_ids_that_only_one_names_count_by_what_is_known_of_them() -> None:
    reference = _made(0.05)
    # Others of the vocabulary that are less likely than any that is kept change nothing.
    all_kept = {id_: -id_ - 1.0 for id_ in range(KEPT)}
    assert reference.distances([{0: all_kept | {900: -80.0}}])["text"] < 0.5
    assert reference.distances([{0: {900 + id_: -id_ - 1.0 for id_ in range(20)}}])["text"] > BOUND


def test_one_position_where_experts_are_chosen_does_not_count() -> None:
    exact = {id_: -id_ - 1.0 for id_ in range(20)}
    wrong = {id_: -id_ - 9.0 for id_ in range(20)}
    answer = {0: exact, 1: wrong, 2: exact}
    assert _made(0.05, routed=True).distances([answer])["text"] < 1
    assert _made(0.05).distances([answer])["text"] > 1
