"""What becomes of requests where the frontend cannot read a model's tokenizer."""

import logging
from pathlib import Path

import msgspec
import pytest

from inlay.errors import EngineError
from inlay.frontend.renderers import Renderers
from inlay.protocol.work import Limits, ModelCard
from tests.models import tiny


def card(path: Path) -> ModelCard:
    return ModelCard(
        name="m",
        path=str(path),
        weights_id="0" * 32,
        dtype="float32",
        vocab_size=1,
        hidden_size=1,
        limits=Limits(max_model_len=64, max_num_seqs=1),
        engine="echo",
        engine_version="0",
    )


async def test_a_client_is_not_shown_where_the_server_has_its_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    renderers = Renderers(None)
    with caplog.at_level(logging.ERROR), pytest.raises(EngineError) as caught:
        await renderers.of(card(tmp_path))
    assert str(tmp_path) not in caught.value.message
    assert str(tmp_path) in caplog.text
    # The next one who asks finds it where it has been mended.
    there = msgspec.structs.replace(card(tmp_path), path=str(tiny("llama")))
    assert (await renderers.of(there)).vocab_size > 0
