"""Servers that answer with what their chat template writes, and clients of them."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import openai
import pytest

from tests.live import Fleet, fleet
from tests.models import tiny

LAST = "{{ messages[-1]['content'] }}<|im_end|>"
"""A template by which the echo engine says what the last message says."""


class Says:
    """Clients of servers over one echo engine, each server with a template of its own."""

    def __init__(self, echo: Fleet, clients: ExitStack) -> None:
        self.echo = echo
        self._clients = clients

    def _url(self, template: str, settings: dict[str, Any]) -> str:
        return self.echo.serve(chat_template=template, **settings)

    def openai(self, template: str = LAST, **settings: Any) -> Any:
        """A client of OpenAI's API."""
        url = self._url(template, settings) + "/v1"
        return self._clients.enter_context(
            openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        )

    def anthropic(self, template: str = LAST, **settings: Any) -> Any:
        """A client of Anthropic's API."""
        url = self._url(template, settings)
        return self._clients.enter_context(
            anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        )


@pytest.fixture(scope="session")
def echo() -> Iterator[Fleet]:
    with fleet(tiny("llama"), engine="echo", max_model_len=5_000_000) as running:
        yield running


@pytest.fixture(scope="module")
def says(echo: Fleet) -> Iterator[Says]:
    with ExitStack() as clients:
        yield Says(echo, clients)
