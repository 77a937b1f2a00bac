"""DeepSeek-R1 in fp8 through `inlay serve` with the built-in engine."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.deepseek import THOUGHTS, tiny_r1
from tests.equality.r1 import ASKED, TOOL, R1Conformance
from tests.serving import Served, serving

BOATS = {
    "type": "object",
    "properties": {"place": {"enum": ["harbour", "hill"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["place", "count"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    words = ("--dtype", "float32", "--served-model-name", "m", "--enable-prompt-embeds")
    with serving(tiny_r1(), *words) as served:
        yield served


class TestR1(R1Conformance):
    """The same tests as vLLM's, of the checkpoint as it is published."""

    async def test_a_form_binds_what_is_behind_the_thoughts(self, client: openai.AsyncOpenAI) -> None:
        form: Any = {"type": "json_schema", "json_schema": {"name": "boats", "schema": BOATS}}
        answer = await client.chat.completions.create(
            model="m", messages=[ASKED], response_format=form, max_tokens=80, temperature=0
        )
        message: Any = answer.choices[0].message
        assert message.reasoning == "".join(THOUGHTS)
        found = json.loads(message.content)
        assert found["place"] in ("harbour", "hill")
        assert found["count"] in range(10)

    async def test_a_call_that_is_required_comes_behind_the_thoughts(
        self, client: openai.AsyncOpenAI
    ) -> None:
        tool: Any = {**TOOL, "function": {"name": "boats", "parameters": BOATS}}
        answer = await client.chat.completions.create(
            model="m",
            messages=[ASKED],
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=80,
            temperature=0,
        )
        message: Any = answer.choices[0].message
        assert message.reasoning == "".join(THOUGHTS)
        [call] = message.tool_calls
        assert json.loads(call.function.arguments)["place"] in ("harbour", "hill")
