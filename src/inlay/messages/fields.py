"""Fields of requests, declared once: meaning, bounds, example, and their names in engines.

A declaration is the metadata of an annotated type. Decoding costs the same with it. From it come
the range check, the API reference, the default of a model's generation config, the check against
an engine's refusals, and the parameters of vLLM and SGLang.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeAlias, get_args, get_type_hints

import msgspec

from inlay.base.errors import ContextLengthError, InvalidRequestError


class Bounds(NamedTuple):
    """Allowed values of a number: `low` to `high`; `low` is excluded if `above`."""

    low: float
    high: float = math.inf
    above: bool = False

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'above' if self.above else 'at least'} {self.low}"
        low = f"{'above' if self.above else 'from'} {self.low}"
        return f"{low} {'and at most' if self.above else 'to'} {self.high}"

    def allow(self, value: float) -> bool:
        """Return True for a value within."""
        return self.low <= value <= self.high and not (self.above and value == self.low)


class Field(msgspec.Struct, frozen=True):
    """Declaration of a field beside its type.

    Attributes:
        text: its meaning.
        example: a value for the API reference, or None.
        bounds: of a number.
        neutral: value of the `Sampling` field of this name that changes nothing.
        model_default: the model's generation config has the value where a request has none.
        vllm: name in vLLM's parameters, if the value is given to it as it is; "" if inlay does
            that itself; None if vLLM lacks it, and a request for it is refused.
        sglang: likewise of SGLang.
    """

    text: str
    example: Any = None
    bounds: Bounds | None = None
    neutral: int | float | bool | None = None
    model_default: bool = False
    vllm: str | None = None
    sglang: str | None = None


def field(text: str, example: Any = None, **declared: Any) -> msgspec.Meta:
    """Return the metadata of an annotated type. Arguments as of `Field`."""
    shown = None if example is None else [example]
    extra = {"field": Field(text, example, **declared)}
    return msgspec.Meta(description=text, examples=shown, extra=extra)


def example(value: Any) -> msgspec.Meta:
    """Return the metadata of a type whose meaning stands elsewhere."""
    return msgspec.Meta(examples=[value])


@cache
def fields_of(kind: type) -> Mapping[str, Field]:
    """Return what is declared of the fields of a type of requests, in their order."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: meta.extra["field"]
        for name in kind.__struct_fields__  # type: ignore[attr-defined]
        for meta in getattr(hints[name], "__metadata__", ())
        if isinstance(meta, msgspec.Meta) and meta.extra is not None
    }


@cache
def _bounds_of(kind: type) -> tuple[tuple[str, Bounds], ...]:
    found = fields_of(kind).items()
    return tuple((name, each.bounds) for name, each in found if each.bounds is not None)


def check_bounds(request: msgspec.Struct, without: str = "") -> None:
    """Check every field with bounds but the one named `without`.

    Raises `InvalidRequestError` that names the field, its value and what is allowed.
    """
    for name, bounds in _bounds_of(type(request)):
        value = getattr(request, name)
        if value is not None and not bounds.allow(value) and name != without:
            raise InvalidRequestError(f"{name} must be {bounds}, got {value}", param=name)


Temperature: TypeAlias = Annotated[
    float | None,
    field(
        "0 or more, 0 is greedy; when absent the model's generation config, else 1.",
        0,
        bounds=Bounds(0),
        neutral=1.0,
        model_default=True,
        vllm="temperature",
        sglang="temperature",
    ),
]
TopP: TypeAlias = Annotated[
    float | None,
    field(
        "probability mass that is sampled from, above 0 and at most 1; when absent the model's "
        "generation config, else 1.",
        0.9,
        bounds=Bounds(0, 1, above=True),
        neutral=1.0,
        model_default=True,
        vllm="top_p",
        sglang="top_p",
    ),
]
TopK: TypeAlias = Annotated[
    int | None,
    field(
        "number of the likeliest tokens that are sampled from, 0 or -1 for all; when absent "
        "the model's generation config, else all.",
        40,
        bounds=Bounds(-1),
        neutral=0,
        model_default=True,
        vllm="top_k",
        sglang="",
    ),
]
MinP: TypeAlias = Annotated[
    float | None,
    field(
        "least probability of a sampled token, as a share of the likeliest's, 0 to 1; when "
        "absent the model's generation config, else 0.",
        0.05,
        bounds=Bounds(0, 1),
        neutral=0.0,
        model_default=True,
        vllm="min_p",
        sglang="min_p",
    ),
]
RepetitionPenalty: TypeAlias = Annotated[
    float | None,
    field(
        "factor above 0 against tokens of prompt and output; when absent the model's "
        "generation config, else 1. It does not see embeddings.",
        1.1,
        bounds=Bounds(0, above=True),
        neutral=1.0,
        model_default=True,
        vllm="repetition_penalty",
    ),
]
MinTokens: TypeAlias = Annotated[
    int | None,
    field(
        "output tokens before an end token, a stop token or a stop string ends it; 0 when "
        "absent, at most the output's limit.",
        8,
        bounds=Bounds(0),
        neutral=0,
        vllm="",
    ),
]
IgnoreEos: TypeAlias = Annotated[
    bool | None,
    field(
        "continue after the model's own end tokens; false when absent.",
        neutral=False,
        vllm="",
        sglang="",
    ),
]
PresencePenalty: TypeAlias = Annotated[
    float | None,
    field(
        "subtracted from a token's logit once it is in the output; -2 to 2, 0 when absent.",
        0.5,
        bounds=Bounds(-2, 2),
        neutral=0.0,
        vllm="presence_penalty",
        sglang="presence_penalty",
    ),
]
FrequencyPenalty: TypeAlias = Annotated[
    float | None,
    field(
        "subtracted from a token's logit for each time it is in the output; -2 to 2, 0 when "
        "absent.",
        0.5,
        bounds=Bounds(-2, 2),
        neutral=0.0,
        vllm="frequency_penalty",
        sglang="frequency_penalty",
    ),
]


class SamplingFields(msgspec.Struct, kw_only=True):
    """Sampling fields that mean to all engines what they mean here.

    Each is a field of `inlay.messages.request.Sampling` of the same name.
    """

    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    min_tokens: MinTokens = None
    ignore_eos: IgnoreEos = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None


SAMPLING: Mapping[str, Field] = fields_of(SamplingFields)
"""Plain sampling fields, by name."""

MODEL_DEFAULTS: Mapping[str, type[int] | type[float]] = {
    name: get_args(get_args(hint)[0])[0]
    for name, hint in get_type_hints(SamplingFields, include_extras=True).items()
    if SAMPLING[name].model_default
}
"""Type of each that a model's generation config may have."""

FOR_VLLM = tuple((each.vllm, name) for name, each in SAMPLING.items() if each.vllm)
FOR_SGLANG = tuple((each.sglang, name) for name, each in SAMPLING.items() if each.sglang)
"""Names in an engine's parameters, and here."""

LACKED_BY_VLLM = tuple(name for name, each in SAMPLING.items() if each.vllm is None)
LACKED_BY_SGLANG = tuple(name for name, each in SAMPLING.items() if each.sglang is None)
"""Fields that an engine does not have."""


def check_length(
    length: int, limit: int, output: int | None = 0, *, says: str = "", param: str = "prompt"
) -> None:
    """Check that a prompt and its output fit.

    Args:
        length: positions of the prompt.
        limit: positions that the model has for both.
        output: maximum tokens of the output; 0 for none, None for what is left, at least one.
        says: the prompt and its length, as an error names them.
        param: field of the request that the prompt comes from.

    Raises:
        ContextLengthError: they do not.
    """
    says = says or f"the prompt has {length}"
    if length > limit or (output != 0 and length == limit):
        more = ", and needs room for at least one more" if output != 0 else ""
        raise _length_error(limit, f"{says}{more}", param)
    if output is not None and length + output > limit:
        raise _length_error(limit, f"{says} and max_tokens asks for {output} more", "max_tokens")


def _length_error(limit: int, says: str, param: str) -> ContextLengthError:
    return ContextLengthError(
        f"This model's maximum context length is {limit} tokens; {says} (--max-model-len).",
        param=param,
    )
