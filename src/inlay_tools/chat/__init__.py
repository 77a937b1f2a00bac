"""`inlay chat`: talk to a model, with pictures and embeddings.

session.py       a chat with a person; prompting.py reads what is typed
conversation.py  messages and the request for the next; attachment.py files in them
answer.py        one answer as it streams in; screen.py shows it
own_server.py    serves a model that nobody serves yet
"""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from inlay.base.errors import InlayError
from inlay.cli.command import UsageError
from inlay.cli.process import Console
from inlay.client import PromptEmbedder, Uploader
from inlay_tools.chat.answer import ChatReply
from inlay_tools.chat.conversation import Transcript
from inlay_tools.chat.own_server import own_server, serve_settings
from inlay_tools.chat.prompting import Prompting, history_file
from inlay_tools.chat.screen import Screen
from inlay_tools.chat.session import COMMANDS, Session
from inlay_tools.files import standard_input
from inlay_tools.http_client import HttpClient, RemoteServer, served_model, server_of
from inlay_tools.settings import ChatSettings


def run(settings: ChatSettings, extra_args: Sequence[str]) -> int:
    """Talk until the end of input, or answer one question; the exit status.

    Raises:
        UsageError: words that contradict each other.
        FileError: a file cannot be read.
        InlayError: the server cannot be reached or refuses; within a chat that is only said.
        KeyboardInterrupt: Ctrl-C during the one question.
    """
    if settings.model is None and extra_args:
        raise UsageError("words after -- are options of inlay serve, and need MODEL")
    if settings.model is not None and settings.url is not None:
        raise UsageError(
            f"--url asks a server, and {settings.model} as MODEL starts one; the name of a model "
            "at a server is --model-name"
        )
    question = _question(settings)
    if question is None and settings.output_format == "json":
        raise UsageError("--output-format json needs --once, or a question on standard input")
    with ExitStack() as stack:
        if settings.model is None:
            server = server_of(settings.url, settings.api_key)
        else:
            running = own_server(serve_settings(settings.model, extra_args))
            server = RemoteServer.of(stack.enter_context(running), None)
        runner = stack.enter_context(asyncio.Runner())
        client = HttpClient(server)
        stack.callback(lambda: runner.run(client.close()))
        model = runner.run(served_model(client, settings.model_name))
        console = Console(sys.stdout, sys.stderr)
        session = Session(
            Transcript(settings, model.name, settings.system_prompt),
            client,
            Uploader(server.url, server.api_key),
            Screen(console),
            _embedder(settings),
        )
        for path in settings.embeds:
            session.attach(path)
        if question is not None:
            _answer_once(session, question, runner, settings.output_format == "json")
            return 0
        session.screen.note(f"{model.name} at {server.url}; /help lists commands, Ctrl-D ends")
        history = history_file() if settings.history else None
        with Prompting(COMMANDS, history) as prompting:
            session.talk(prompting, runner)
    return 0


def _question(settings: ChatSettings) -> str | None:
    """The one question to answer, or None for a chat with a person."""
    if settings.once is not None and settings.once != "-":
        return settings.once
    if settings.once == "-" or not sys.stdin.isatty():
        text = standard_input().strip()
        if not text and not settings.embeds:
            raise UsageError("standard input holds no question")
        return text
    return None


def _embedder(settings: ChatSettings) -> PromptEmbedder | None:
    """Reader of rows as tokens, where the model's files are at hand."""
    if settings.model is None:
        return None
    try:
        return PromptEmbedder.from_pretrained(settings.model)
    except InlayError:
        # The server reads more kinds of models than the client does: rows are shown without tokens.
        return None


def _answer_once(session: Session, question: str, runner: asyncio.Runner, as_json: bool) -> None:
    answer = ChatReply()
    if not as_json:
        runner.run(session.answer(question, answer))
        return
    session.screen = Silent(session.screen.console)
    runner.run(session.answer(question, answer))
    said = {
        "model": session.conversation.model,
        "content": answer.text,
        "reasoning": answer.reasoning or None,
        "finish_reason": answer.finish_reason,
        "usage": answer.usage,
    }
    session.screen.console.out(msgspec.json.encode(said).decode() + "\n")


class Silent(Screen):
    """A screen that shows no answer, because all of it is printed as JSON in the end."""

    def text(self, text: str) -> None:
        """Nothing."""

    def aside(self, text: str) -> None:
        """Nothing."""
