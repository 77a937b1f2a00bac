"""Channels of GPT-OSS: reasoning, answer and tool calls as messages with headers.

<|channel|>analysis<|message|>They ask for ...<|end|><|start|>assistant<|channel|>final<|message|>It
is ...<|return|> <|channel|>commentary to=functions.look <|constrain|>json<|message|>{"place":
"harbour"}<|call|>
"""

import re

from inlay.render.output import ReasoningPiece
from inlay.render.parsers.calls import CallsParser
from inlay.render.parsers.source import Show, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"

_ENDS = (END, RETURN, CALL, START, CHANNEL)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."


class HarmonyParser(CallsParser):
    """Parser of channels: analysis is reasoning, calls of functions are tool calls, else content.

    Calls are tool calls only if the request has tools.
    """

    def _read(self) -> Steps[None]:
        source = self.source
        tag = yield from self.content(*_ENDS)
        while tag is not None:
            if tag in (END, RETURN, CALL):
                source.settle()
                tag = yield from self.content(*_ENDS)
                continue
            header, message = yield from source.collect(MESSAGE)
            source.settle()
            if message is None:  # the text ended inside a header
                return
            tag = yield from self._message(tag + header)

    def _message(self, header: str) -> Steps[str | None]:
        """Show the body of a message and return the tag after it, which is not settled."""
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL.search(header)
        show: Show = self._show_content
        if recipient is not None and recipient[1].startswith(_FUNCTIONS) and self.tools.schemas:
            yield self.open(recipient[1].removeprefix(_FUNCTIONS))
            show = self.piece
        elif channel is not None and channel[1] == "analysis":
            show = ReasoningPiece
        return (yield from self.source.until(_ENDS, show))
