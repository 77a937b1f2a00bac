"""One server for most attacks.

A tiny Llama, embeddings on, a chat template that writes out whatever a message holds.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import tiny
from tests.security.company import Question, questions
from tests.serving import Served, serving

BODY_TIMEOUT = 2

CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}<|im_start|>tool\n{{ tool | tojson }}<|im_end|>\n{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.name %}{{ message.name + ': ' }}{% endif %}"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments }}){% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def path() -> Path:
    return tiny("llama")


@pytest.fixture(scope="session")
def asked(path: Path) -> tuple[Question, ...]:
    """Request of the good client, answered once by `transformers`."""
    return questions(path)


@pytest.fixture(scope="session")
def server(
    path: Path, asked: tuple[Question, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    arguments = (
        "--enable-prompt-embeds",
        "--body-timeout",
        BODY_TIMEOUT,
        "--chat-template",
        template,
    )
    with serving(path, "--served-model-name", "m", *arguments) as served:
        yield served
