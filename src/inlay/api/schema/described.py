"""Fields that several types have, each with its meaning and an example."""

from typing import Annotated, Any, TypeAlias

import msgspec

from inlay.messages.fields import field

ModelName: TypeAlias = Annotated[str, field("served name of the model.", "my-model")]
ListIndex: TypeAlias = Annotated[int, field("place in the list, from 0.", 0)]
CreatedAt: TypeAlias = Annotated[int, field("Unix time of the answer.", 1764000000)]
Fingerprint: TypeAlias = Annotated[
    str | msgspec.UnsetType,
    field(
        "equal where release, engine, weights and dtype of the model are equal.",
        "inlay-0.2.0-1f2e3d4c",
    ),
]
PromptTokens: TypeAlias = Annotated[
    int, field("positions of the prompt; rows of embeddings and images count.", 17)
]
OutputTokens: TypeAlias = Annotated[int, field("tokens of the answer.", 8)]
TotalTokens: TypeAlias = Annotated[int, field("prompt and answer together.", 25)]
CachedTokens: TypeAlias = Annotated[int, field("positions of the prompt that were cached.", 16)]
ReasoningTokens: TypeAlias = Annotated[int, field("tokens of the reasoning.", 0)]
NotCounted: TypeAlias = Annotated[int, field("As in OpenAI's form; inlay does not count it.", 0)]
AnswerText: TypeAlias = Annotated[str, field("text of the answer, or what is new of it.", " Paris")]
TokenText: TypeAlias = Annotated[str, field("text of the token.", " Paris")]
Logprob: TypeAlias = Annotated[float, field("natural logarithm of its probability.", -0.25)]
FinishReason: TypeAlias = Annotated[
    str | None,
    field(
        "`stop`, `length` at a limit of tokens, or `tool_calls`; null until the answer ends.",
        "stop",
    ),
]
StopReason: TypeAlias = Annotated[
    int | str | None,
    field("stop string, or id of `stop_token_ids`, that ended the answer; null otherwise.", "\n\n"),
]
TokenIds: TypeAlias = Annotated[
    list[int] | None, field("ids of the answer's tokens; null unless asked for.", [464, 29])
]
PromptTokenIds: TypeAlias = Annotated[
    list[int] | None,
    field("ids of the prompt; null unless asked for, and where it holds embeddings.", [1, 887]),
]
ToolName: TypeAlias = Annotated[str, field("name of the tool.", "weather")]
ToolArguments: TypeAlias = Annotated[
    str, field("arguments as the model wrote them, in JSON.", '{"city": "Paris"}')
]
HiddenSize: TypeAlias = Annotated[int, field("elements of a row.", 2048)]


class StageUsage(msgspec.Struct, frozen=True):
    """Positions that one stage of a pipeline read, and what it made: tokens, codes or samples."""

    input_tokens: Annotated[int, field("positions that the stage read.", 17)]
    output_tokens: Annotated[int, field("positions that it made.", 1024)]


Stages: TypeAlias = Annotated[
    dict[str, StageUsage] | msgspec.UnsetType,
    field("share of each stage of a pipeline, by its name."),
]


QUESTION = "What is the capital of France?"
CHAT: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
ROWS = "<base64 of a tensor file>"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}
