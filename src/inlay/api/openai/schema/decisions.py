"""Types of `/v1/decisions`."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from inlay.api.openai.schema.responses import InputTokensDetails, OutputTokensDetails

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

    value: ChoiceValue
    description: Text = ""


class Level(_Strict, frozen=True, kw_only=True):
    """One level of a scale; levels count from 0.

    Attributes:
        label: shown to the model.
        description: shown to the model beside it.
    """

    label: Text
    description: Text = ""


class _Question(_Strict, frozen=True, kw_only=True, tag_field="type"):
    instructions: Text | list[dict[str, Any]]
    name: Text | msgspec.UnsetType = msgspec.UNSET


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

    choices: Annotated[list[Choice], msgspec.Meta(min_length=2, max_length=255)]


class ScoreQuestion(_Question, frozen=True, kw_only=True, tag="score"):
    """A question of how much, on a scale.

    Attributes:
        instructions: the question: a text, or parts `input_text` and `input_json`.
        name: repeated in the answer.
        levels: 2 to 10, the lowest first.
    """

    levels: Annotated[list[Level], msgspec.Meta(min_length=2, max_length=10)]


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

    input: str | list[dict[str, Any]]
    questions: Annotated[list[Question], msgspec.Meta(min_length=1, max_length=400)]
    model: str | None = None
    orders: Literal[1, 2] = 1
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    safety_identifier: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    service_tier: str | None = None


class PredicateAnswer(msgspec.Struct, frozen=True, tag="predicate", tag_field="type"):
    """Probability of true, as a share of true and false.

    `label_mass` is the probability that the model answers with one of the options at all.
    """

    name: str | None
    probability: float
    label_mass: float


class ChoiceProbability(msgspec.Struct, frozen=True):
    """Probability of one choice; those of a question add up to 1."""

    value: ChoiceValue
    probability: float


class ChoiceAnswer(msgspec.Struct, frozen=True, tag="choice", tag_field="type"):
    """The likeliest choice; `confidence` is its probability times `label_mass`."""

    name: str | None
    choice: ChoiceValue
    confidence: float
    probabilities: list[ChoiceProbability]
    label_mass: float


class ScoreProbability(msgspec.Struct, frozen=True):
    """Probability of one level; those of a question add up to 1."""

    value: int
    label: str
    probability: float


class ScoreAnswer(msgspec.Struct, frozen=True, tag="score", tag_field="type"):
    """The mean level; `confidence` is the probability of the likeliest times `label_mass`."""

    name: str | None
    score: float
    confidence: float
    probabilities: list[ScoreProbability]
    label_mass: float


Answer: TypeAlias = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class DecisionUsage(msgspec.Struct, frozen=True):
    """Positions of the prompts of all reads, and their tokens, one each."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Decision(msgspec.Struct, frozen=True):
    """The answers, in the order of the questions."""

    model: str
    answers: list[Answer]
    usage: DecisionUsage
