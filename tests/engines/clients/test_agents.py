"""The Agents SDK of OpenAI, unchanged, in each of its ways to keep a conversation."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
)

from tests.serving import Served

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]

QUIET = RunConfig(tracing_disabled=True)
SAID = ("count the lanterns", "go on", "and now")


@pytest.fixture
async def client(server: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.v1, api_key="k", max_retries=0) as made:
        yield made


def agent(client: openai.AsyncOpenAI) -> Agent:
    settings = ModelSettings(temperature=0)
    model = OpenAIResponsesModel("m", client)
    return Agent("one", model=model, model_settings=settings)


async def answers(client: openai.AsyncOpenAI) -> list[str]:
    """Return the answers where the client sends all that was said each time."""
    found: list[str] = []
    items: list[Any] = []
    for said in SAID:
        result = await Runner.run(
            agent(client), [*items, {"role": "user", "content": said}], run_config=QUIET
        )
        items = result.to_input_list()
        found.append(result.final_output)
    return found


async def test_a_conversation_goes_on_by_previous_ids(client: openai.AsyncOpenAI) -> None:
    found, last = [], None
    for said in SAID:
        result = await Runner.run(agent(client), said, previous_response_id=last, run_config=QUIET)
        last = result.last_response_id
        found.append(result.final_output)
    assert found == await answers(client)
    alone = await Runner.run(
        agent(client), SAID[0], auto_previous_response_id=True, run_config=QUIET
    )
    assert alone.final_output == found[0]


async def test_a_conversation_goes_on_by_its_id(client: openai.AsyncOpenAI) -> None:
    kept = await client.conversations.create()
    found = []
    for said in SAID:
        result = await Runner.run(agent(client), said, conversation_id=kept.id, run_config=QUIET)
        found.append(result.final_output)
    assert found == await answers(client)


async def test_a_conversation_goes_on_in_a_session(client: openai.AsyncOpenAI) -> None:
    session = OpenAIConversationsSession(openai_client=client)
    found = []
    for said in SAID:
        result = await Runner.run(agent(client), said, session=session, run_config=QUIET)
        found.append(result.final_output)
    assert found == await answers(client)
    assert len(await session.get_items()) == 2 * len(SAID)
    last = await session.pop_item()
    assert last["role"] == "assistant"
    assert len(await session.get_items()) == 2 * len(SAID) - 1
    await session.clear_session()
    assert await session.get_items() == []


async def test_a_streamed_run_has_the_same_answer(client: openai.AsyncOpenAI) -> None:
    result = Runner.run_streamed(agent(client), SAID[0], run_config=QUIET)
    async for _ in result.stream_events():
        pass
    assert result.final_output == (await answers(client))[0]
