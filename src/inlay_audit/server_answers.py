"""Answers of a server to rows, for `inlay embeds audit --url`."""

import asyncio
from collections.abc import Sequence

import msgspec
from pydantic import SecretStr

from inlay.base.errors import EngineError
from inlay.client import EmbeddedPrompt
from inlay_audit.prompts import Floats
from inlay_tools.http_client import HttpClient, served_model, server_of

ANSWER_TOKENS = 16
"""Tokens of an answer that are compared at most."""

_AT_A_TIME = 16


class _AnswerChoice(msgspec.Struct):
    text: str


class _Completion(msgspec.Struct):
    choices: tuple[_AnswerChoice, ...]


class ServerAnswers:
    """Greedy answers of a server's model."""

    def __init__(
        self, url: str, api_key: SecretStr | None, model_name: str | None, table_id: str
    ) -> None:
        self._server = server_of(url, api_key)
        self._model_name = model_name
        self._table_id = table_id

    def find_model(self) -> None:
        """Ask the server for its model. Raises `InlayError` where it has none or is not there."""
        asyncio.run(self._find_model())

    async def _find_model(self) -> None:
        client = HttpClient(self._server)
        try:
            self._model_name = (await served_model(client, self._model_name)).name
        finally:
            await client.close()

    def __call__(self, rows: Sequence[Floats]) -> list[str]:
        """The answer to each prompt's rows, in order. Raises `InlayError` where the server does."""
        return asyncio.run(self._answers(rows))

    async def _answers(self, rows: Sequence[Floats]) -> list[str]:
        client = HttpClient(self._server)
        room = asyncio.Semaphore(_AT_A_TIME)
        try:
            model = (await served_model(client, self._model_name)).name

            async def one(prompt: Floats) -> str:
                async with room:
                    return await self._answer(client, model, prompt)

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(prompt)) for prompt in rows]
        except* Exception as group_of:
            raise group_of.exceptions[0] from None
        finally:
            await client.close()
        return [task.result() for task in tasks]

    async def _answer(self, client: HttpClient, model: str, rows: Floats) -> str:
        body = {
            "model": model,
            "prompt": None,
            "prompt_embeds": EmbeddedPrompt(rows, self._table_id).to_base64(),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
        }
        answer = await client.json("POST", "/completions", body)
        try:
            return msgspec.convert(answer, _Completion).choices[0].text
        except (msgspec.ValidationError, IndexError) as error:
            raise EngineError(f"{client.server.url} answered no completion") from error
