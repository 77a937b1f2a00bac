"""What DeepSeek-R1 must answer through a real server, whatever the engine.

The tokens of plain transformers, reasoning told
apart from the answer, tool calls. A subclass has a fixture `server`.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.deepseek import ANSWER, ARGUMENTS, EOS_ID, SCRIPT, THOUGHTS, plain_r1
from tests.equality.reference import greedy, rows_of, tokenizer_of
from tests.equality.test_over_http import TEXTS, TOKENS, saved, ways
from tests.serving import Served

ASKED: Any = {"role": "user", "content": "which boats lie in the harbour?"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "boats",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}

BOATS = {
    "type": "object",
    "properties": {"place": {"enum": ["harbour", "hill"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["place", "count"],
    "additionalProperties": False,
}  # fmt: skip


def without_end(ids: list[int]) -> list[int]:
    return ids[:-1] if ids and ids[-1] == EOS_ID else ids


class R1Conformance:
    """One R1, asked by the `openai` client."""

    @pytest.fixture
    async def client(self, server: Served) -> AsyncIterator[openai.AsyncOpenAI]:
        async with openai.AsyncOpenAI(
            base_url=server.v1, api_key="unused", max_retries=0
        ) as client:
            yield client

    async def test_every_form_of_a_prompt_decodes_to_the_reference_in_company(
        self, client: openai.AsyncOpenAI
    ) -> None:
        path = plain_r1()
        texts = TEXTS[:4]
        want = {
            text: without_end(greedy(path, rows_of(path, tokenizer_of(path).encode(text)), TOKENS))
            for text in texts
        }
        requests = [
            (text, name, fields) for text in texts for name, fields in ways(path, text).items()
        ]

        async def complete(prompt: Any, extra_body: Any = None) -> list[int]:
            answer = await client.completions.create(
                model="m",
                prompt=prompt,
                max_tokens=TOKENS,
                temperature=0,
                extra_body={"return_token_ids": True, **(extra_body or {})},
            )
            choice: Any = answer.choices[0]
            return without_end(choice.token_ids)

        together = await asyncio.gather(*(complete(**fields) for _, _, fields in requests))
        for (text, name, _), got in zip(requests, together, strict=True):
            assert got == want[text], f"{name}: {text!r}"

    async def test_thoughts_are_told_from_the_answer_and_its_call(
        self, client: openai.AsyncOpenAI
    ) -> None:
        answer = await client.chat.completions.create(
            model="m", messages=[ASKED], tools=[TOOL], max_tokens=40, temperature=0
        )
        message: Any = answer.choices[0].message
        assert (message.reasoning, message.content) == ("".join(THOUGHTS), ANSWER.strip())
        [call] = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("boats", "".join(ARGUMENTS))
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(SCRIPT)
        details = answer.usage.completion_tokens_details
        assert details is not None
        assert details.reasoning_tokens == len(THOUGHTS) + 1

    async def test_a_stream_says_what_the_whole_says(self, client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(
            model="m", messages=[ASKED], tools=[TOOL], max_tokens=40, temperature=0, stream=True
        )
        thoughts, content, calls, reasons = "", "", "", []
        async for chunk in stream:
            for choice in chunk.choices:
                delta: Any = choice.delta
                thought = getattr(delta, "reasoning", None) or ""
                # What is thought comes before what is answered.
                assert not (thought and (content or calls))
                thoughts += thought
                content += delta.content or ""
                for call in delta.tool_calls or []:
                    calls += (call.function.name or "") + (call.function.arguments or "")
                reasons.append(choice.finish_reason)
        assert (thoughts, content, calls) == (
            "".join(THOUGHTS),
            ANSWER.strip(),
            "boats" + "".join(ARGUMENTS),
        )
        # How many pieces they come in is the machine's: what waits is sent together.
        assert reasons[-1] == "tool_calls"

    async def test_without_tools_the_call_is_text(self, client: openai.AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(
            model="m", messages=[ASKED], max_tokens=40, temperature=0
        )
        message: Any = answer.choices[0].message
        assert message.reasoning == "".join(THOUGHTS)
        assert message.content == "".join((ANSWER, *SCRIPT[5:-1])).lstrip("\n")

    async def test_a_chat_with_rows_is_the_chat_in_text(self, client: openai.AsyncOpenAI) -> None:
        path = plain_r1()
        # What the model said and what the tool said is in the next prompt; earlier thoughts are
        # not.
        said: Any = {"role": "assistant", "content": "\n\nIt is the hill."}
        document = " the town counts its boats"
        rows = saved(rows_of(path, tokenizer_of(path).encode(document, add_special_tokens=False)))
        parts = [{"type": "text", "text": "what of"}, {"type": "prompt_embeds", "data": rows}]
        last: Any = {"role": "user", "content": parts}
        text: Any = {"role": "user", "content": "what of" + document}
        answers: list[Any] = [
            await client.chat.completions.create(
                model="m",
                messages=[ASKED, said, message],
                max_tokens=40,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
            for message in (text, last)
        ]
        in_text, with_rows = (answer.choices[0] for answer in answers)
        assert with_rows.message == in_text.message
        counted = [
            (answer.usage.prompt_tokens, answer.usage.completion_tokens) for answer in answers
        ]
        assert counted[0] == counted[1]
        assert "".join(THOUGHTS) == getattr(with_rows.message, "reasoning", None)

    async def test_what_a_tool_said_is_answered_without_thinking_anew(
        self, client: openai.AsyncOpenAI
    ) -> None:
        first = await client.chat.completions.create(
            model="m", messages=[ASKED], tools=[TOOL], max_tokens=40, temperature=0
        )
        message: Any = first.choices[0].message
        messages: list[Any] = [
            ASKED,
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "two boats"},
        ]
        path = plain_r1()
        shown = tokenizer_of(path).apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        assert shown.endswith("two boats<｜tool▁output▁end｜><｜tool▁outputs▁end｜>")
        ids = tokenizer_of(path).encode(shown, add_special_tokens=False)
        answer = await client.chat.completions.create(
            model="m", messages=messages, tools=[TOOL], max_tokens=16, temperature=0,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        choice: Any = answer.choices[0]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(ids)
        assert without_end(choice.token_ids) == without_end(greedy(path, rows_of(path, ids), 16))

    async def test_a_form_binds_what_is_behind_the_thoughts(
        self, client: openai.AsyncOpenAI
    ) -> None:
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


__all__ = ["R1Conformance"]
