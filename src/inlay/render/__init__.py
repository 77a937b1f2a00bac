"""Text, chats and ids: what stands between what clients write and the positions models read.

No torch.
"""

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
    ReasoningDelta,
    ReasoningIds,
    ToolCallDelta,
)
from inlay.render.renderer import Renderer
from inlay.render.stop_strings import StopMatcher, StopStrings

__all__ = [
    "PLAIN",
    "Begins",
    "ContentDelta",
    "Detokenizer",
    "End",
    "OutputDelta",
    "OutputFormat",
    "OutputParser",
    "ParsedOutput",
    "ReasoningDelta",
    "ReasoningIds",
    "Renderer",
    "Side",
    "StopMatcher",
    "StopStrings",
    "ToolCallDelta",
]
