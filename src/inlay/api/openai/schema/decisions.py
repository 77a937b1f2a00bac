"""Types of `/v1/decisions`."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from inlay.api.openai.schema.responses import InputTokensDetails, OutputTokensDetails
from inlay.api.schema.described import ModelName, OutputTokens, PromptTokens, TotalTokens
from inlay.messages.fields import example, field

Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=1_048_576)]
ChoiceValue: TypeAlias = str | bool


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Choice(_Strict, frozen=True, kw_only=True):
    """One choice of a question.

    Attributes:
        value: a string or a boolean; `true` and `"true"` are two values.
        description: shown to the model beside it.
    """

    value: Annotated[ChoiceValue, example("billing")]
    description: Annotated[Text, example("payments")] = ""


class Level(_Strict, frozen=True, kw_only=True):
    """One level of a scale; levels count from 0.

    Attributes:
        label: shown to the model.
        description: shown to the model beside it.
    """

    label: Annotated[Text, example("calm")]
    description: Annotated[Text, example("no complaint")] = ""


class _Question(_Strict, frozen=True, kw_only=True, tag_field="type"):
    instructions: Annotated[Text | list[dict[str, Any]], example("Which team?")]
    name: Annotated[Text | msgspec.UnsetType, example("team")] = msgspec.UNSET


class PredicateQuestion(_Question, frozen=True, kw_only=True, tag="predicate"):
    """A question of true or false.

    Attributes:
        instructions: the question: a text, or parts `input_text` and `input_json`.
        name: repeated in the answer.
    """


class ChoiceQuestion(_Question, frozen=True, kw_only=True, tag="choice"):
    """A question with choices, of which one is right.

    Attributes:
        instructions: the question: a text, or parts `input_text` and `input_json`.
        name: repeated in the answer.
        choices: 2 to 255, of different values.
    """

    choices: Annotated[
        list[Choice],
        msgspec.Meta(min_length=2, max_length=255),
        example([{"value": "billing"}, {"value": "returns"}]),
    ]


class ScoreQuestion(_Question, frozen=True, kw_only=True, tag="score"):
    """A question of how much, on a scale.

    Attributes:
        instructions: the question: a text, or parts `input_text` and `input_json`.
        name: repeated in the answer.
        levels: 2 to 10, the lowest first.
    """

    levels: Annotated[
        list[Level],
        msgspec.Meta(min_length=2, max_length=10),
        example([{"label": "calm"}, {"label": "angry"}]),
    ]


Question: TypeAlias = PredicateQuestion | ChoiceQuestion | ScoreQuestion


class DecisionRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request to `/v1/decisions`: questions about one state.

    Attributes:
        model: served name; when absent the first model that fits the route.
        input: the state: a text, or items as in responses, also with `prompt_embeds`, and parts
            `input_json`.
        questions: 1 to 400; each is one read of the model, behind the same state.
        orders: 1 (when absent) reads each question once, as vLLM does; 2 also with its options
            reversed, and returns the mean.
        prompt_cache_key: requests with the same key go to the same worker where possible.
        prompt_cache_options: accepted; prefixes are always cached.
        safety_identifier: accepted; nothing depends on it. At most 128 characters.
        cache_salt: prompts share cached prefixes only under equal salts; not empty.
        priority: lower values are served first, 0 when absent; others only with
            --scheduling-policy priority.
        service_tier: "flex" gives way to all other requests, as batches do; others change nothing.
    """

    input: Annotated[str | list[dict[str, Any]], example("The parcel came late.")]
    questions: Annotated[
        list[Question],
        msgspec.Meta(min_length=1, max_length=400),
        example([{"type": "predicate", "instructions": "Is it urgent?"}]),
    ]
    model: str | None = None
    orders: Literal[1, 2] = 1
    prompt_cache_key: str | None = None
    prompt_cache_options: Annotated[Any, example({"mode": "implicit"})] = None
    safety_identifier: Annotated[
        Annotated[str, msgspec.Meta(max_length=128)] | None, example("somebody")
    ] = None
    cache_salt: str | None = None
    priority: int | None = None
    service_tier: Annotated[str | None, example("flex")] = None


class PredicateAnswer(msgspec.Struct, frozen=True, tag="predicate", tag_field="type"):
    """Probability of true, as a share of true and false.

    `label_mass` is the probability that the model answers with one of the options at all.
    """

    name: Annotated[str | None, field("name of the question.", "urgent")]
    probability: Annotated[float, field("0 to 1.", 0.75)]
    label_mass: Annotated[
        float, field("probability that the model answers with one of the options at all.", 0.95)
    ]


class ChoiceProbability(msgspec.Struct, frozen=True):
    """Probability of one choice; those of a question add up to 1."""

    value: Annotated[ChoiceValue, field("the choice.", "billing")]
    probability: Annotated[float, field("0 to 1.", 0.75)]


class ChoiceAnswer(msgspec.Struct, frozen=True, tag="choice", tag_field="type"):
    """The likeliest choice; `confidence` is its probability times `label_mass`."""

    name: Annotated[str | None, field("name of the question.", "team")]
    choice: Annotated[ChoiceValue, field("value of the likeliest choice.", "billing")]
    confidence: Annotated[float, field("0 to 1.", 0.7)]
    probabilities: Annotated[list[ChoiceProbability], field("of the options, in their order.")]
    label_mass: Annotated[
        float, field("probability that the model answers with one of the options at all.", 0.95)
    ]


class ScoreProbability(msgspec.Struct, frozen=True):
    """Probability of one level; those of a question add up to 1."""

    value: Annotated[int, field("the level, from 0.", 0)]
    label: Annotated[str, field("its label.", "calm")]
    probability: Annotated[float, field("0 to 1.", 0.75)]


class ScoreAnswer(msgspec.Struct, frozen=True, tag="score", tag_field="type"):
    """The mean level; `confidence` is the probability of the likeliest times `label_mass`."""

    name: Annotated[str | None, field("name of the question.", "mood")]
    score: Annotated[float, field("mean level, from 0.", 0.25)]
    confidence: Annotated[float, field("0 to 1.", 0.7)]
    probabilities: Annotated[list[ScoreProbability], field("of the options, in their order.")]
    label_mass: Annotated[
        float, field("probability that the model answers with one of the options at all.", 0.95)
    ]


Answer: TypeAlias = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class DecisionUsage(msgspec.Struct, frozen=True):
    """Positions of the prompts of all reads, and their tokens, one each."""

    input_tokens: PromptTokens
    input_tokens_details: Annotated[InputTokensDetails, field("more about the prompt.")]
    output_tokens: OutputTokens
    output_tokens_details: Annotated[OutputTokensDetails, field("more about the answer.")]
    total_tokens: TotalTokens


class Decision(msgspec.Struct, frozen=True):
    """The answers, in the order of the questions."""

    model: ModelName
    answers: Annotated[list[Answer], field("one for each question, in their order.")]
    usage: Annotated[DecisionUsage, field("Positions and tokens of this answer.")]
