"""`inlay demo`: serve the bundled model and show, by requests to itself, what it does."""

import asyncio
import json
import shlex
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from inlay import demo
from inlay.base.errors import InvalidRequestError
from inlay.cli import demo_draw, demo_images
from inlay.cli.process import Console
from inlay.cli.serve import RunningServer, run_host
from inlay.cli.settings import DemoSettings, ServeSettings
from inlay.client import PromptEmbedder, load
from inlay.client.connection import JSON, ApiClient, Question
from inlay.engine.settings import EngineSettings
from inlay.extension import extensions
from inlay.http.address import check_address
from inlay.http.settings import FrontendSettings
from inlay.store.settings import BatchSettings, ResponseSettings

MODEL_NAME = "inlay-demo"
DEFAULT_PORT = 8000
SOFT_PROMPT_INPUTS = 3
"""Inputs of the soft prompt's task that are shown."""

ANSWER_TOKENS = 32


def run(settings: DemoSettings) -> int:
    """Serve and show the examples, then keep serving if so set; return the exit status.

    Raises:
        InlayError: the server did not start, or answered a request with an error.
    """
    console = Console(sys.stdout, sys.stderr)
    given = served(settings, _port(settings, console))

    async def show(running: RunningServer) -> None:
        shown = _show_images if settings.images else _show_drawn if settings.draw else _show
        await asyncio.to_thread(shown, running.url, console)
        if settings.keep_serving:
            _link(running.url, console, settings)
            console.line("serving until Ctrl-C")
        else:
            running.stop.set()

    return run_host(given, console, show)


def served(settings: DemoSettings, port: int) -> ServeSettings:
    """Return the settings of the server; it keeps what clients store where those parts are loaded.

    Raises `InvalidRequestError`.
    """
    stores = {
        "batches": ("batches", BatchSettings(batch_store="memory")),
        "state": ("responses", ResponseSettings(response_store="memory")),
    }
    kept: dict[str, Any] = dict(stores[each.name] for each in extensions() if each.name in stores)
    return ServeSettings(
        # Its answers were checked in float32, with the weights as they are stored.
        engine=EngineSettings.of(**_model(settings), dtype="float32"),
        frontend=FrontendSettings(
            host=settings.host,
            port=port,
            enable_prompt_embeds=True,
            enable_embedding_lookup=True,
            log_requests=False,
        ),
        **kept,
    )


def _model(settings: DemoSettings) -> dict[str, Any]:
    """The settings of the engine that say which model is shown. Raises `InvalidRequestError`."""
    if settings.images and settings.draw:
        raise InvalidRequestError("--images and --draw are two demonstrations; ask for one")
    if settings.draw:
        return {"model": str(demo.pipeline_dir() / "graph.yaml")}
    if settings.images:
        return {
            "model": str(demo.vision_dir()),
            "served_model_name": [MODEL_NAME],
            "enable_mm_embeds": True,
        }
    return {"model": str(demo.model_dir()), "served_model_name": [MODEL_NAME]}


def _port(settings: DemoSettings, console: Console) -> int:
    if settings.port is not None:
        return settings.port
    try:
        check_address(settings.host, DEFAULT_PORT)
    except InvalidRequestError as error:
        console.line(f"{error.message}; the demo takes a free port instead")
        return 0
    return DEFAULT_PORT


@dataclass(frozen=True)
class _Server:
    """The server, as a client that knows only HTTP sees it."""

    url: str

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        defaults = {"model": MODEL_NAME, "temperature": 0, "max_tokens": ANSWER_TOKENS}
        question = Question("POST", path, json.dumps(defaults | body).encode(), JSON)
        answer: dict[str, Any] = json.loads(ApiClient(f"{self.url}/v1", None, 60).send(question))
        return answer

    def chat(self, content: object) -> str:
        """The answer to one user message."""
        answer = self._post(
            "/chat/completions", {"messages": [{"role": "user", "content": content}]}
        )
        text: str = answer["choices"][0]["message"]["content"]
        return text.strip()

    def drawn(self, question: str, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The parts of the answer to a question: its text and an image."""
        message = {"role": "user", "content": question}
        answer = self._post("/chat/completions", {"messages": [message], **fields})
        parts: list[dict[str, Any]] = answer["choices"][0]["message"]["content"]
        return parts

    def complete(self, embeds: str) -> str:
        """The continuation of a prompt of embeddings, base64."""
        text: str = self._post("/completions", {"prompt_embeds": embeds})["choices"][0]["text"]
        return text.strip()


def question_shown() -> demo.ChatExample:
    """The first example that is one question and nothing before it."""
    return next(chat for chat in demo.examples().chats if len(chat.messages) == 1)


def _show(url: str, console: Console) -> None:
    question = question_shown().messages[0].content
    for line in _demonstration(_Server(url), question):
        console.out(line + "\n")
    console.out("\nTry it:\n\n")
    for snippet in (
        _curl(url, question),
        _curl_embeds(url, question),
        f"# What is in a file of embeddings?\n{_inspect()}",
        f"# Does the model answer the same? What can be read from the rows?\n{_audit(url)}",
        _python(url, question),
    ):
        console.out(snippet + "\n\n")


def _link(url: str, console: Console, settings: DemoSettings) -> None:
    if settings.images or settings.draw:
        console.line(f"or in a browser: {url}/")
        return
    asked = urlencode({"ask": question_shown().messages[0].content}, quote_via=quote)
    console.line(f"or in a browser: {url}/#{asked}")
    console.line(f"- what is in a file? Drop {demo.soft_prompt_path()} there and choose Rows")
    console.line("- does it answer the same? Choose Text and embeddings")
    console.line("- what can be read from it? Choose Noise, and Try all levels")


def _show_images(url: str, console: Console) -> None:
    for line in demo_images.demonstration(_Server(url).chat):
        console.out(line + "\n")
    console.out("\nTry it:\n\n")
    console.out(demo_images.curl(url, MODEL_NAME) + "\n\n")
    console.out(demo_images.python(url, MODEL_NAME, _interpreter()) + "\n\n")


def _show_drawn(url: str, console: Console) -> None:
    folder = Path(tempfile.gettempdir()) / "inlay-demo"
    for line in demo_draw.demonstration(_Server(url).drawn, console.stdout, folder):
        console.out(line + "\n")
    console.out("\nTry it:\n\n")
    console.out(demo_draw.curl(url, MODEL_NAME) + "\n\n")
    console.out(demo_draw.python(url, MODEL_NAME, _interpreter()) + "\n\n")


def _demonstration(server: _Server, question: str) -> Iterator[str]:
    examples = demo.examples()
    embedder = PromptEmbedder.from_pretrained(demo.model_dir())

    yield "\n1. A question in text"
    yield f"   > {question}"
    yield f"   < {server.chat(question)}"

    rows = embedder.embed_messages([{"role": "user", "content": question}])
    embeds = rows.to_base64()
    yield "\n2. The same as embeddings: no text is sent"
    size = f"{rows.num_tokens} rows of {rows.hidden_size}"
    yield f"   > prompt_embeds: {size} ({len(embeds)} characters of base64)"
    yield f"   < {server.complete(embeds)}"

    mixed = examples.mixed[0]
    yield "\n3. A chat that mixes both: the document as embeddings, the question as text"
    yield f"   > {mixed.before}[embeddings of {mixed.document!r}]{mixed.after}"
    parts = [
        {"type": "text", "text": mixed.before},
        embedder.chat_part(mixed.document),
        {"type": "text", "text": mixed.after},
    ]
    yield f"   < {server.chat(parts)}"

    soft = load(demo.soft_prompt_path())
    task = examples.soft_prompt
    best = task.text_prompts[0]
    about = task.description.rstrip(".")
    yield f"\n4. A soft prompt: {soft.num_tokens} trained rows for a task ({about})"
    yield (
        f"   It is right on {task.accuracy:.0%} of held-out inputs, the best of "
        f"{len(task.text_prompts)} text prompts on {best.accuracy:.0%}."
    )
    for example in inputs_shown():
        answer = server.chat([soft.chat_part(), {"type": "text", "text": example.input}])
        yield f"   > [soft prompt]{example.input}"
        yield f"   < {answer}" + (
            "" if answer == example.answer else f"   (expected {example.answer})"
        )


def inputs_shown() -> list[demo.Labelled]:
    """Held-out inputs with different answers: three times the same would look like a constant."""
    held_out = demo.examples().soft_prompt.held_out
    return list({example.answer: example for example in reversed(held_out)}.values())[
        :SOFT_PROMPT_INPUTS
    ]


def _body(fields: dict[str, Any]) -> str:
    return json.dumps({"model": MODEL_NAME, "temperature": 0, "max_tokens": ANSWER_TOKENS} | fields)


def _curl(url: str, question: str) -> str:
    body = _body({"messages": [{"role": "user", "content": question}]})
    return (
        f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(body)}"
    )


def _interpreter() -> str:
    """The interpreter that has inlay, as a shell calls it."""
    found = shutil.which("python")
    return "python" if found == sys.executable else shlex.quote(sys.executable)


def _command() -> str:
    """inlay, as a shell calls it."""
    return "inlay" if shutil.which("inlay") else f"{_interpreter()} -m inlay.cli"


def _inspect() -> str:
    rows, model = (shlex.quote(str(path)) for path in (demo.soft_prompt_path(), demo.model_dir()))
    return f"{_command()} embeds inspect {rows} --model {model}"


def _audit(url: str) -> str:
    texts, model = (shlex.quote(str(path)) for path in (demo.texts_path(), demo.model_dir()))
    return (
        f"{_command()} embeds audit --model {model} \\\n"
        f"  --texts {texts} --url {url}/v1 \\\n"
        "  --attackers fast --transform none noise:1"
    )


def _curl_embeds(url: str, question: str) -> str:
    messages = json.dumps([{"role": "user", "content": question}])
    before, after = _body({"prompt_embeds": "@"}).split("@")
    # curl reads standard input, as a prompt of embeddings may be longer than a command line.
    return (
        f"embeds=$(echo {shlex.quote(messages)} |\n"
        f"  {_command()} embeds encode --base64 --messages - --model "
        f"{shlex.quote(str(demo.model_dir()))})\n"
        f"printf '%s' {shlex.quote(before)} \"$embeds\" {shlex.quote(after)} |\n"
        f"  curl -s {url}/v1/completions -H 'Content-Type: application/json' -d @-"
    )


def _python(url: str, question: str) -> str:
    return textwrap.dedent(f"""\
        {_interpreter()} - <<'EOF'
        from inlay.client import PromptEmbedder
        from openai import OpenAI

        client = OpenAI(base_url="{url}/v1", api_key="unused")
        embedder = PromptEmbedder.from_pretrained({str(demo.model_dir())!r})
        chat = embedder.embed_messages([{{"role": "user", "content": {question!r}}}])
        answer = client.completions.create(
            model="{MODEL_NAME}", temperature=0, max_tokens={ANSWER_TOKENS},
            **chat.completion_args(),
        )
        print(answer.choices[0].text)
        EOF""")
