"""Tokenizer, chat templates, detokenizer, stop strings, and parsers of outputs. No torch.

    Renderer.load(path)                  tokenizer.json and chat template of a model directory
    renderer.encode(text)                token ids; encode_texts and encode_pairs take many
    renderer.chat(messages, rows=...)    a `Prompt`; a part {"type": "prompt_embeds", "index": i}
                                         stands for rows[i], and one of type "image" for an
                                         image of `images`
    renderer.decode(ids)                 text; token_text and token_bytes take one id
    renderer.detokenizer()               `Detokenizer`: push(ids) and flush() return text
    OutputFormat.parser()                `OutputParser`: push(text) and flush() return deltas
    StopStrings(stops), StopMatcher      one automaton for a request, one matcher for a choice

Invariants:
- Text of a message is never taken for embeddings or for a control token of the renderer.
- A detokenizer's pieces join to the text of all ids, however the ids are split.
- A parser loses no text and never raises: text that only looks like a tool call is content.
- Templates run in a sandbox, bounded in time and size.
"""

from inlay.render.conversation import NO_MEDIA, ChatMedia, MediaForm
from inlay.render.detokenizer import Detokenizer
from inlay.render.ends import End, Side
from inlay.render.output import (
    PLAIN,
    Begins,
    ContentDelta,
    OutputDelta,
    OutputFormat,
    OutputParser,
    ParsedOutput,
    ReasoningIds,
    ReasoningPiece,
    ToolCallDelta,
)
from inlay.render.renderer import Renderer
from inlay.render.stop_strings import StopMatcher, StopStrings

__all__ = [
    "NO_MEDIA",
    "PLAIN",
    "Begins",
    "ChatMedia",
    "ContentDelta",
    "Detokenizer",
    "End",
    "MediaForm",
    "OutputDelta",
    "OutputFormat",
    "OutputParser",
    "ParsedOutput",
    "ReasoningIds",
    "ReasoningPiece",
    "Renderer",
    "Side",
    "StopMatcher",
    "StopStrings",
    "ToolCallDelta",
]
