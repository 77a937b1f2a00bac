"""Requests for a model whose tokenizer the frontend cannot read."""

import gc
import logging
import shutil
import weakref
from pathlib import Path

import msgspec
import pytest

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.http.serve import check
from inlay.http.settings import FrontendSettings
from inlay.http.tables import Tables
from inlay.messages.card import Limits, ModelCard
from inlay.render.renderer import Renderers
from inlay.render.template import read_template
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
    renderers = Renderers(None, set)
    with caplog.at_level(logging.ERROR), pytest.raises(EngineError) as caught:
        await renderers.of(card(tmp_path))
    assert str(tmp_path) not in caught.value.message
    assert str(tmp_path) in caplog.text
    # The next one who asks finds it where it has been mended.
    there = msgspec.structs.replace(card(tmp_path), path=str(tiny("llama")))
    assert (await renderers.of(there)).vocab_size > 0


SHORT = "{% for message in messages %}[{{ message.content }}]{% endfor %}"


async def test_a_chat_template_may_be_given_itself_or_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "short.jinja"
    path.write_text(SHORT)
    for given in (SHORT, str(path)):
        of = await Renderers(given, set).of(card(tiny("llama")))
        assert "[hello]" in of.decode(of.chat([{"role": "user", "content": "hello"}]).token_ids())


async def test_tokenizers_and_tables_of_models_that_are_served_no_more_are_dropped(
    tmp_path: Path,
) -> None:
    served: set[str] = set()
    renderers, tables = Renderers(None, lambda: served), Tables(lambda: served)
    known: list[weakref.ref[object]] = []
    for rollout in range(5):
        path = shutil.copytree(tiny("llama"), tmp_path / str(rollout))
        served = {str(path), str(tmp_path / "0")}
        known += [weakref.ref(await one.of(card(path))) for one in (renderers, tables)]
    tables.close()
    gc.collect()
    # The first, which is still served, and the last.
    assert [at for at, one in enumerate(known) if one() is not None] == [0, 1, 8, 9]
    assert await renderers.of(card(tmp_path / "0")) is known[0]()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("no/such/file.jinja", "cannot read the chat template"),
        ("{% for message in messages %}", "the chat template is not valid, line 1"),
        ("{{ a }}" * 1000 + "{%", "the chat template is not valid"),
    ],
)
def test_a_chat_template_that_is_none_is_refused_before_a_model_is_loaded(
    given: str, said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        read_template(given)
    with pytest.raises(InvalidRequestError, match=said):
        check(FrontendSettings(chat_template=given))
