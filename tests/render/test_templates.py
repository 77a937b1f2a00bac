"""Chat templates: where they are found, what they may do, what they do to embeddings, and what is said of those that fail."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from inlay.base.errors import InvalidRequestError
from inlay.messages.prompt import Rows, Tokens
from inlay.render import Renderer
from inlay.render.template import ChatTemplate
from tests.render.chats import CHATS, TOOL, embeds, rows, text, user
from tests.render.directories import LLAMA_TEMPLATE, PARTS_TEMPLATE, llama_like, qwen_like


@pytest.mark.parametrize(
    ("body", "reads"),
    [
        ("{{ m.content }}", False),
        ("{{ m.content | tojson }}", False),
        ("{{ m.content | trim }}", False),
        ("{{ m.content[0].text }}", False),
        ("{% if m.content is not string %}{{ m.content[0].text }}{% endif %}", False),
        ("{{ 'A: ' + m.content }}", False),
        ("{% if m.content is string %}{{ m.content }}{% endif %}", False),
        ("{% for p in m['content'] %}{{ p['text'] }}{% endfor %}", True),
        ("{% set c = m.content %}{% for p in c | list %}{{ p.text | trim }} {% endfor %}", True),
        ("{{ m.content | map(attribute='text') | join }}", True),
        (
            "{% if m.role == 'system' %}{{ m.content }}{% else %}{{ m.content | map(attribute='text') | join }}{% endif %}",
            True,
        ),
    ],
)
def test_whether_a_template_reads_parts_is_found_by_trying(body: str, reads: bool) -> None:
    of = Renderer.load(qwen_like(), chat_template="{% for m in messages %}" + body + "{% endfor %}")
    shown = of.decode(of.chat(user(text("a"), text("b"))).token_ids())
    assert shown.replace(" ", "") == {False: "a\nb", True: "ab"}[reads] or shown in (
        '"a\\nb"',
        "A: a\nb",
    )
    if "system" in body:
        system = of.chat([{"role": "system", "content": [text("a"), text("b")]}])
        assert of.decode(system.token_ids()) == "a\nb"


@pytest.mark.parametrize(
    "change",
    [
        "tojson",
        "upper",
        "lower",
        "title",
        "trim",
        "escape",
        "urlencode",
        "tojson | tojson",
        "string",
    ],
)
def test_marks_survive_what_templates_do_to_content(change: str) -> None:
    source = "{% for m in messages %}{{ m.content | " + change + " }}{% endfor %}"
    of = Renderer.load(qwen_like(), chat_template=source)
    prompt = of.chat(user(text("a b"), embeds(0), text("é 1")), rows=[rows()])
    assert [type(segment) for segment in prompt.segments] == [Tokens, Rows, Tokens]


def test_a_template_that_loses_embeddings_is_named() -> None:
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    chat = [{"role": "assistant", "content": [embeds(0)]}, *user(embeds(1))]
    with pytest.raises(
        InvalidRequestError, match=r"dropped 1 of 2 prompt_embeds parts \(number 0, from 0\)"
    ):
        Renderer.load(qwen_like(), chat_template=source).chat(chat, rows=[rows(), rows()])


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (
            "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
            "wrote 2 prompt_embeds parts 4 times",
        ),
        ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", "changed the order"),
        ("{{ messages[0].content[:30] }}", "dropped 2 of 2"),
        ("nothing", "dropped 2 of 2"),
    ],
)
def test_a_template_that_doubles_or_moves_embeddings_is_named(source: str, complaint: str) -> None:
    chat = [*user(embeds(0)), *user(embeds(1))]
    with pytest.raises(InvalidRequestError, match=complaint):
        Renderer.load(qwen_like(), chat_template=source).chat(chat, rows=[rows(), rows()])


def test_what_a_template_raises_reaches_the_client_in_its_words() -> None:
    of = Renderer.load(llama_like())
    with pytest.raises(
        InvalidRequestError, match="Only user, assistant and system roles are supported, not tool"
    ):
        of.chat([{"role": "tool", "content": "x"}])
    with pytest.raises(InvalidRequestError, match=r"the chat template: .*no attribute 'a'"):
        Renderer.load(qwen_like(), chat_template="{{ messages[0].content.a.b }}").chat(CHATS["one"])
    of = Renderer.load(qwen_like(), chat_template="{{ messages[0].n + 1 }}")
    with pytest.raises(InvalidRequestError, match="failed on these messages: TypeError"):
        of.chat([{"role": "user", "n": "x"}])


def test_a_templates_complaint_shows_no_marks() -> None:
    of = Renderer.load(
        qwen_like(), chat_template="{{ raise_exception('bad: ' + messages[0].content) }}"
    )
    with pytest.raises(InvalidRequestError) as caught:
        of.chat(user(text("a "), embeds(0), text("1")), rows=[rows()])
    assert caught.value.message == "the chat template: bad: a <prompt_embeds>1"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template"])
def test_fields_of_the_request_are_no_variables(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is not a variable for the template"):
        Renderer.load(qwen_like()).chat(CHATS["one"], template_kwargs={name: []})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ raise_exception.__globals__.a }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ 100000 * messages * 100000 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
        "{% include 'x' %}",
        "{{ nothing.at.all }}",
    ],
)
def test_a_template_can_neither_reach_out_nor_run_away(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="the chat template"):
        Renderer.load(qwen_like(), chat_template=source).chat(CHATS["one"])


def test_a_template_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inlay.render.template.MAX_SECONDS", -1.0)
    with pytest.raises(InvalidRequestError, match="took more than -1 seconds"):
        Renderer.load(qwen_like()).chat(CHATS["one"])


def test_a_given_template_that_is_not_one_is_refused_when_it_is_read() -> None:
    with pytest.raises(InvalidRequestError, match="not valid, line 2: Expected an expression"):
        Renderer.load(qwen_like(), chat_template="a\n{% for %}{% endfor %}")


class TestWhereTemplatesAreFound:
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        """A tokenizer without a template."""
        (tmp_path / "tokenizer.json").write_bytes((qwen_like() / "tokenizer.json").read_bytes())
        return tmp_path

    @staticmethod
    def show(directory: Path, **options: Any) -> str:
        of = Renderer.load(directory)
        return of.decode(of.chat(CHATS["one"], **options).token_ids())

    def test_none_is_an_error_that_says_what_to_do(self, directory: Path) -> None:
        with pytest.raises(
            InvalidRequestError, match="no default chat template: serve it with --chat-template"
        ):
            self.show(directory)

    def test_in_the_configuration_with_special_tokens_as_strings_or_objects(
        self, directory: Path
    ) -> None:
        template = "{{ bos_token }}|{{ eos_token }}|{{ audio_token }}"
        config = {
            "chat_template": template,
            "bos_token": {"content": "<|im_start|>", "special": True},
            "eos_token": "<|im_end|>",
            "pad_token": None,
            "audio_token": "<think>",
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        assert self.show(directory) == "<|im_start|>|<|im_end|>|<think>"

    def test_by_name_the_one_for_tools_when_there_are_tools(self, directory: Path) -> None:
        named = [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "{{ tools | length }} tool"},
        ]
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        assert self.show(directory) == "plain"
        assert self.show(directory, tools=[TOOL]) == "1 tool"

    def test_a_default_is_needed_among_the_named(self, directory: Path) -> None:
        config = {"chat_template": [{"name": "rag", "template": "x"}]}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(InvalidRequestError, match="no default chat template, only rag"):
            self.show(directory)

    def test_files_go_before_the_configuration(self, directory: Path) -> None:
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
        (directory / "chat_template.jinja").write_text("new", encoding="utf-8")
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
        assert self.show(directory) == "new"
        assert self.show(directory, tools=[TOOL]) == "with tools"


def test_what_templates_of_models_use_is_there() -> None:
    source = (
        "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ strftime_now('%Y') | length }}"
        "{% set ns = namespace(n=0) %}{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}"
        "{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}{{ {'a': '<é>'} | tojson(indent=1) }}"
    )
    of = Renderer.load(llama_like(), chat_template=source)
    shown = of.decode(of.chat(CHATS["one"]).token_ids())
    assert shown == 'Hello world43{\n "a": "<é>"\n}'


def test_roles_that_clients_make_up_are_not_remembered() -> None:
    template = ChatTemplate(PARTS_TEMPLATE, {})
    assert all(template.reads(f"role {number}") == template.reads("user") for number in range(50))
    assert len(template._reads) == 1


def test_a_template_that_reads_lists_alone_gets_strings_as_lists() -> None:
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    of = Renderer.load(qwen_like(), chat_template=source)
    assert of.decode(of.chat(CHATS["one"]).token_ids()) == "[Hello world]"


def test_the_template_of_tests_is_the_one_transformers_was_given() -> None:
    assert AutoTokenizer.from_pretrained(llama_like()).chat_template == LLAMA_TEMPLATE
