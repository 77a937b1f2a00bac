"""A chat with a person: messages, commands that begin with a slash, answers."""

import asyncio
import difflib
import textwrap
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from inlay.base.errors import InlayError, NotFoundError
from inlay.cli.command import FileError
from inlay.cli.process import columns, waiting
from inlay.client import PromptEmbedder, Uploader
from inlay_tools.chat.answer import ChatReply, streamed
from inlay_tools.chat.attachment import attachment
from inlay_tools.chat.conversation import ConversationMessage, Transcript
from inlay_tools.chat.prompting import Prompting
from inlay_tools.chat.screen import Interrupts, Screen
from inlay_tools.http_client import HttpClient
from inlay_tools.inspect import described

HELP: Mapping[str, str] = {
    "/attach FILE": "Put a picture or a file of embeddings before the next message.",
    "/rows": "Show the rows of all embeddings in the chat.",
    "/system TEXT": "Set the system message; without TEXT there is none.",
    "/clear": "Forget all messages; the system message stays.",
    "/help": "Show this.",
    "/bye": "End, as Ctrl-D does.",
}
COMMANDS = tuple(usage.split()[0] for usage in HELP)
_TYPING = (
    'Ctrl-C ends an answer. A line that ends in \\ goes on in the next; """ begins and ends a '
    "message of several lines. // begins a message with a slash."
)


@dataclass
class Session:
    """A chat.

    Attributes:
        conversation: what was said.
        client: the server.
        uploader: to the same server.
        screen: where answers go.
        embedder: reads rows as tokens for `/rows`, or None where the model's files are not known.
    """

    conversation: Transcript
    client: HttpClient
    uploader: Uploader
    screen: Screen
    embedder: PromptEmbedder | None = None

    def talk(self, prompting: Prompting, runner: asyncio.Runner) -> None:
        """Answer messages until the end of input, or `/bye`."""
        with Interrupts() as interrupts:
            while True:
                try:
                    with interrupts.typing():
                        message = prompting.message().strip()
                except EOFError:
                    self.screen.console.out("\n")
                    return
                except KeyboardInterrupt:
                    self.screen.console.out("\n")
                    self.screen.note("/bye or Ctrl-D ends the chat")
                    continue
                if message == "/bye":
                    return
                try:
                    self._said(message, runner, interrupts)
                except FileError as error:
                    self.screen.note(str(error))
                except InlayError as error:
                    self.screen.note(error.message)

    def _said(self, message: str, runner: asyncio.Runner, interrupts: Interrupts) -> None:
        if message.startswith("//"):
            message = message[1:]
        elif message.startswith("/"):
            self._command(message)
            return
        if not message and not self.conversation.attached:
            return

        async def answered() -> None:
            with interrupts.answering():
                await self.answer(message, ChatReply())

        try:
            runner.run(answered())
        except asyncio.CancelledError:
            self.screen.note("stopped")

    async def answer(self, message: str, answer: ChatReply) -> None:
        """Ask, show the answer, and remember both.

        After Ctrl-C what had come by then is remembered. After an error nothing is.

        Raises:
            InlayError: the server refuses, or is lost.
        """
        conversation = self.conversation
        conversation.ask(message)
        try:
            await self._streamed(answer)
        except InlayError:
            conversation.take_back()
            raise
        except asyncio.CancelledError:
            if answer.text:
                conversation.messages.append(_assistant(answer.text))
            else:
                conversation.take_back()
            raise
        finally:
            self.screen.end()
        conversation.messages.append(_assistant(answer.text))

    async def _streamed(self, answer: ChatReply) -> None:
        try:
            await self._shown(answer)
        except NotFoundError as error:
            # The server forgot embeddings that were uploaded: they are uploaded again, once.
            if answer.text or error.code != NotFoundError.default_code:
                raise
            self.uploader.forget()
            await self._shown(answer)

    async def _shown(self, answer: ChatReply) -> None:
        with waiting(self.screen.console, "sending"):
            body = await asyncio.to_thread(self.conversation.body, self.uploader)
        async with aclosing(streamed(self.client, body, answer)) as pieces:
            with waiting(self.screen.console, "waiting for the answer"):
                first = await anext(pieces, None)
            if first is None:
                return
            self._show(*first)
            last = first[0]
            async for kind, text in pieces:
                if kind != last:
                    self.screen.end()
                last = kind
                self._show(kind, text)
                # Much may have come at once, and Ctrl-C takes effect where the task waits.
                await asyncio.sleep(0)

    def _show(self, kind: str, text: str) -> None:
        (self.screen.text if kind == "text" else self.screen.aside)(text)

    def _command(self, message: str) -> None:
        word, _, rest = message.partition(" ")
        acts: dict[str, Callable[[str], None]] = {
            "/attach": self._attach,
            "/rows": self._rows,
            "/system": self._system,
            "/clear": self._clear,
            "/help": self._help,
        }
        act = acts.get(word)
        if act is None:
            near = difflib.get_close_matches(word, COMMANDS, n=1)
            hint = f", did you mean {near[0]}?" if near else "; /help lists them"
            self.screen.note(f"unknown command {word}{hint}")
            return
        act(rest.strip())

    def attach(self, path: Path) -> None:
        """Put a file before the next message. Raises `FileError`, `InvalidRequestError`."""
        attached = attachment(path.expanduser())
        self.conversation.attached.append(attached)
        self.screen.note(f"attached {attached.described()}")

    def _attach(self, rest: str) -> None:
        if not rest:
            self.screen.note("/attach needs a FILE")
            return
        self.attach(Path(rest.strip("'\"")))

    def _rows(self, rest: str) -> None:
        found = self.conversation.embeddings()
        if not found:
            self.screen.note("there are no embeddings in this chat; /attach FILE puts some in")
        for embeddings in found:
            lines = described(embeddings.prompt, self.embedder, top=1)
            self.screen.text("\n".join([embeddings.path.name, *lines]) + "\n")

    def _system(self, rest: str) -> None:
        self.conversation.system = rest or None
        self.screen.note("system message set" if rest else "no system message")

    def _clear(self, rest: str) -> None:
        self.conversation.clear()
        self.screen.note("forgotten")

    def _help(self, rest: str) -> None:
        width = columns()
        lines = [
            line
            for usage, text in HELP.items()
            for line in (
                usage,
                *textwrap.wrap(
                    text, max(width - 4, 10), initial_indent="    ", subsequent_indent="    "
                ),
            )
        ]
        lines += textwrap.wrap(_TYPING, max(width, 10))
        self.screen.console.out("\n".join(lines) + "\n")


def _assistant(text: str) -> ConversationMessage:
    return ConversationMessage("assistant", text)
