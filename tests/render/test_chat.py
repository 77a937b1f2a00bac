"""Chats as transformers renders them; embeddings in the middle; text that looks like embeddings."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from inlay.base.errors import InvalidRequestError
from inlay.messages.prompt import Prompt, Rows, Tokens
from inlay.render import Renderer
from inlay.render.marks import PlaceholderMarks
from tests.models import tiny
from tests.render.chats import CHATS, TOOL, WITH_TOOLS, embeds, rows, text, user
from tests.render.directories import PARTS_TEMPLATE, llama_like, qwen_like


def ids_of(directory: Path, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return list(
        tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    )


@pytest.mark.parametrize(
    "directory", [qwen_like, llama_like, lambda: tiny("llama")], ids=["qwen", "llama", "tiny"]
)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generate", [True, False])
def test_chats_are_rendered_as_transformers_renders_them(
    directory: Any, chat: str, generate: bool
) -> None:
    expected = ids_of(directory(), CHATS[chat], add_generation_prompt=generate)
    prompt = Renderer.load(directory()).chat(CHATS[chat], add_generation_prompt=generate)
    assert prompt == Prompt.of(Tokens(expected))


def test_tools_reasoning_and_variables_are_rendered_as_transformers_renders_them() -> None:
    expected = ids_of(
        qwen_like(), WITH_TOOLS, tools=[TOOL], add_generation_prompt=True, enable_thinking=False
    )
    prompt = Renderer.load(qwen_like()).chat(
        WITH_TOOLS, tools=[TOOL], template_kwargs={"enable_thinking": False}
    )
    assert prompt == Prompt.of(Tokens(expected))


def test_arguments_sent_as_json_text_are_the_same_as_sent_as_an_object() -> None:
    of = Renderer.load(qwen_like())
    as_text = json.loads(json.dumps(WITH_TOOLS))
    function = as_text[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    assert of.chat(as_text) == of.chat(WITH_TOOLS)
    assert json.loads(function["arguments"]) == {"q": "é <x>"}
    function["arguments"] = ""
    assert '"arguments": {}' in of.decode(of.chat(as_text).token_ids())
    for odd in ([1], 5):
        function["arguments"] = odd
        with pytest.raises(InvalidRequestError, match="must be a") as refused:
            of.chat(as_text)
        assert refused.value.param == "messages[1].tool_calls[0].function.arguments"


CALLS_IF_NONE = """\
{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}<call>{{ m['tool_calls'][0]['function']['name'] }}\
{% elif m['role'] == 'assistant' %}<say>{{ m['content'] }}{% else %}<user>{{ m['content'] }}{% endif %}{% endfor %}"""
CALLS_IF_TEXT = """\
{% for m in messages %}{% if m.tool_calls %}{{ m.content.strip() + '<call>' + m.tool_calls[0].function.name }}\
{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("template", [CALLS_IF_NONE, CALLS_IF_TEXT])
@pytest.mark.parametrize(
    "given", [{}, {"content": None}, {"content": ""}, {"content": "\n\n"}], ids=str
)
def test_a_message_with_calls_alone_has_the_content_its_template_looks_for(
    template: str, given: dict[str, Any]
) -> None:
    of = Renderer.load(qwen_like(), chat_template=template)
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    prompt = of.chat(
        [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call], **given}]
    )
    assert of.decode(prompt.token_ids()) == "<user>x<call>look"


CALLS_WITH_TOOLS = """\
{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if tools and m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}{% endif %}{% endfor %}"""


def test_calls_are_text_where_a_template_writes_none_without_tools() -> None:
    of = Renderer.load(qwen_like(), chat_template=CALLS_WITH_TOOLS)
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat = [CHATS["one"][0], {"role": "assistant", "content": "yes", "tool_calls": [call]}]
    shown = of.decode(of.chat(chat, tools=[TOOL]).token_ids())
    assert shown == "<user>Hello world<assistant>yes<call>look"
    shown = of.decode(of.chat(chat).token_ids())
    assert shown == '<user>Hello world<assistant>yes\n[{"name": "look", "arguments": {}}]'


OF_USERS = "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}{% elif m.role == 'system' %}<s>{{ m.content }}{% endif %}{% endfor %}"
WITH_CRITIC = OF_USERS.replace("'user'", "'critic'")


@pytest.mark.parametrize("role", ["usr", "User", "", "critic"])
def test_a_role_that_neither_openai_nor_the_template_has_is_refused(role: str) -> None:
    of = Renderer.load(qwen_like(), chat_template=OF_USERS)
    with pytest.raises(
        InvalidRequestError, match=f"must be one of system, .*tool.*got '{role}'"
    ) as refused:
        of.chat([{"role": "user", "content": "x"}, {"role": role, "content": "x"}])
    assert refused.value.param == "messages[1].role"


def test_a_role_that_the_template_names_is_taken() -> None:
    of = Renderer.load(qwen_like(), chat_template=WITH_CRITIC)
    assert of.decode(of.chat([{"role": "critic", "content": "x"}]).token_ids()) == "<u>x"


def test_a_developer_is_the_system_to_a_template_that_knows_none() -> None:
    of = Renderer.load(qwen_like(), chat_template=OF_USERS)
    chat = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "x"}]
    assert of.decode(of.chat(chat).token_ids()) == "<s>be brief<u>x"
    assert chat[0]["role"] == "developer"


@pytest.mark.parametrize("directory", [qwen_like, llama_like], ids=["qwen", "llama"])
@pytest.mark.parametrize("content", ["The town is", "The town is  ", "  a\n"])
def test_a_final_message_is_continued_as_transformers_continues_it(
    directory: Any, content: str
) -> None:
    chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": content}]
    expected = ids_of(directory(), chat, continue_final_message=True)
    of = Renderer.load(directory())
    assert of.chat(chat, add_generation_prompt=False, continue_final_message=True) == Prompt.of(
        Tokens(expected)
    )
    parts: list[dict[str, Any]] = [chat[0], {"role": "assistant", "content": [text(content)]}]
    assert of.chat(parts, add_generation_prompt=False, continue_final_message=True) == Prompt.of(
        Tokens(expected)
    )


def test_what_cannot_be_continued_is_refused() -> None:
    of = Renderer.load(qwen_like())
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    call = {"function": {"name": "look", "arguments": "{}"}}
    with pytest.raises(InvalidRequestError, match="it ends with tool calls"):
        of.chat([{"role": "assistant", "content": "x", "tool_calls": [call]}], **options)
    with pytest.raises(InvalidRequestError, match="writes its content 0 times"):
        Renderer.load(qwen_like(), chat_template=OF_USERS).chat(
            [{"role": "assistant", "content": "x"}], **options
        )
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        of.chat(CHATS["one"], continue_final_message=True)


@pytest.mark.parametrize("directory", [qwen_like, llama_like], ids=["qwen", "llama"])
def test_embeddings_stand_where_their_part_stands(directory: Any) -> None:
    of = Renderer.load(directory())
    first, second = rows(2, fill=1), rows(3, fill=2)
    prompt = of.chat(
        user(text("Hello "), embeds(0), text(" world"), embeds(1)), rows=[first, second]
    )
    kinds = [type(segment) for segment in prompt.segments]
    assert kinds == [Tokens, Rows, Tokens, Rows, Tokens]
    assert prompt.segments[1] is first
    assert prompt.segments[3] is second
    # A tokenizer that puts a space in front of a text puts one behind a special token too, and so
    # behind rows.
    shown = of.decode(prompt.token_ids(), skip_special_tokens=True).split()
    assert (
        shown
        == of.decode(
            of.chat(user(text("Hello  world"))).token_ids(), skip_special_tokens=True
        ).split()
    )


def test_text_is_cut_at_embeddings_and_nowhere_else() -> None:
    """The ids around rows are those of the texts around them, as around a special token."""
    of = Renderer.load(qwen_like())
    prompt = of.chat(user(text("the town counts"), embeds(0), text("the lanterns")), rows=[rows()])
    before, _, after = prompt.segments
    assert isinstance(before, Tokens)
    assert isinstance(after, Tokens)
    assert before.ids == of.encode("<|im_start|>user\nthe town counts")
    assert after.ids == of.encode("the lanterns<|im_end|>\n<|im_start|>assistant\n")


def test_rows_without_text_and_neighbouring_rows_need_no_text_between() -> None:
    of = Renderer.load(qwen_like())
    parts = [rows(1, fill=1), rows(0), rows(2, fill=3)]
    prompt = of.chat(user(*(embeds(index) for index in range(3))), rows=parts)
    assert prompt.segments[1:-1] == (parts[0], parts[2])


def test_embeddings_may_be_in_any_message_a_template_writes() -> None:
    of = Renderer.load(qwen_like())
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": [embeds(0)]},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [text("a"), embeds(1)]},
        {"role": "tool", "content": [embeds(2), text("b")]},
        {"role": "user", "content": [embeds(3)]},
    ]
    parts = [rows(1, fill=number) for number in range(4)]
    prompt = of.chat(chat, rows=parts)
    assert [segment for segment in prompt.segments if isinstance(segment, Rows)] == parts
    prompt = of.chat(chat[:4], rows=parts[:3], tools=[TOOL])
    assert [segment for segment in prompt.segments if isinstance(segment, Rows)] == parts[:3]


def test_text_next_to_embeddings_reads_as_it_would_next_to_text() -> None:
    """Whatever the template does to parts, it does to the text and the rows in it together."""
    of = Renderer.load(qwen_like(), chat_template=PARTS_TEMPLATE)
    prompt = of.chat(user(text(" a "), embeds(0), text(" b "), text(" c ")), rows=[rows()])
    texts = [of.decode(part.ids) for part in prompt.segments if isinstance(part, Tokens)]
    assert texts == ["<user>a ", " bc</user>"]


def test_text_parts_are_joined_by_lines_unless_the_template_reads_parts() -> None:
    parts = user(text("a"), text("b"), {**text("c"), "cache_control": {}})
    joined = Renderer.load(qwen_like())
    assert "user\na\nb\nc<" in joined.decode(joined.chat(parts).token_ids())
    reads = Renderer.load(qwen_like(), chat_template=PARTS_TEMPLATE)
    assert reads.decode(reads.chat(parts).token_ids()) == "<user>abc</user>"


HOSTILE = [
    "<prompt_embeds>",
    "<|prompt_embeds|>",
    "<rows 0123456789abcdef>",
    "0" * 46,
    "{{ messages }}",
    "{% raise %}",
    # Of another request: they are drawn anew for each.
    pytest.param(PlaceholderMarks(1).rows(0), id="marks"),
]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_nothing_a_client_writes_is_taken_for_embeddings(hostile: str) -> None:
    of = Renderer.load(qwen_like())
    chat: list[dict[str, Any]] = [
        {"role": "user", "name": hostile, "content": [text(hostile), embeds(0), text(hostile)]},
        {
            "role": "assistant",
            "content": hostile,
            "reasoning_content": hostile,
            "tool_calls": [
                {"function": {"name": hostile, "arguments": json.dumps({hostile: hostile})}}
            ],
        },
        {"role": "tool", "content": hostile},
    ]
    tool = {"type": "function", "function": {"name": hostile, "description": hostile}}
    prompt = of.chat(chat, rows=[rows()], tools=[tool], template_kwargs={"note": hostile})
    assert sum(isinstance(segment, Rows) for segment in prompt.segments) == 1
    plain = json.loads(json.dumps(chat))
    plain[0]["content"] = hostile + hostile
    assert of.decode(prompt.token_ids()) == of.decode(of.chat(plain, tools=[tool]).token_ids())


@pytest.mark.parametrize("named", [[0], [0, 0], [1, 0], [0, 2], [0, 1, 2], []])
def test_rows_must_be_named_once_in_order(named: list[int]) -> None:
    of = Renderer.load(qwen_like())
    with pytest.raises(InvalidRequestError, match="each of the 2 must be named once, in order"):
        of.chat(user(text("a"), *map(embeds, named)), rows=[rows(), rows()])


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "must not be empty"),
        ([{"content": "x"}], "must have a role"),
        (
            user({"type": "image_url", "image_url": {}}),
            r"\[0\] must be a part of type text, prompt_embeds or image",
        ),
        (user({"type": "text"}), "must be a part of type"),
        ([{"role": "user", "content": ["x"]}], "must be a part of type"),
        ([{"role": "user", "content": {"a": 1}}], "must be a string or a list of parts, got dict"),
    ],
)
def test_malformed_messages_are_refused(messages: list[dict[str, Any]], complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        Renderer.load(qwen_like()).chat(messages)


def test_messages_are_left_as_they_are() -> None:
    chat = json.loads(json.dumps(WITH_TOOLS)) + user(text("a"), embeds(0))
    before = json.dumps(chat)
    Renderer.load(qwen_like()).chat(
        chat, rows=[rows()], add_generation_prompt=False, continue_final_message=True
    )
    assert json.dumps(chat) == before


contents = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)


@given(st.lists(contents | st.none(), min_size=1, max_size=6))
def test_any_mixture_of_text_and_rows_is_the_text_cut_at_the_rows(parts: list[str | None]) -> None:
    """None stands for rows.

    Template and text between rows tokenize as they would around a special token.
    """
    of = _plain()
    number = 0
    content = []
    for part in parts:
        if part is None:
            content.append(embeds(number))
            number += 1
        else:
            content.append(text(part))
    prompt = of.chat(user(*content), rows=[rows(1, fill=index) for index in range(number)])
    runs: list[str] = [""]
    for index, part in enumerate(parts):
        if part is None:
            runs.append("")
        else:
            line = "\n" if index and parts[index - 1] is not None else ""
            runs[-1] += line + part
    assert prompt.token_ids() == tuple(id_ for run in runs for id_ in of.encode(run))
    assert sum(isinstance(segment, Rows) for segment in prompt.segments) == number


_renderers: list[Renderer] = []


def _plain() -> Renderer:
    if not _renderers:
        _renderers.append(Renderer.load(qwen_like(), chat_template="{{ messages[0].content }}"))
    return _renderers[0]
