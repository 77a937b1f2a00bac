"""Checks of a request before it is queued: it must be able to run in this engine."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Protocol

from inlay.base.errors import EmbeddingsError, InvalidRequestError, NotFoundError
from inlay.media.positions import GRID_FIELD
from inlay.media.spec import NAMED, MediaSpec
from inlay.messages.card import ModelCard
from inlay.messages.fields import check_length
from inlay.messages.hidden_states import HiddenStates
from inlay.messages.prompt import DTYPE_SIZES, Media, Prompt, Rows, Tokens
from inlay.messages.request import GrammarKind, Request, Sampling

MAX_HIDDEN_STATES = 2**28
"""Bytes of the hidden states that one request may ask for: they pass its consumer's memory."""


class LengthLimits(Protocol):
    """Length limits of an engine."""

    def check(self, request: Request) -> None:
        """Raise `ContextLengthError` or another `InvalidRequestError` if it can never run."""


@dataclass(frozen=True, slots=True)
class MaxModelLen:
    """Limit of prompt and output together.

    Attributes:
        max_model_len: maximum number of positions.
        engine: name of the engine, for messages.
    """

    max_model_len: int
    engine: str

    def check(self, request: Request) -> None:
        """Raise `ContextLengthError` or another `InvalidRequestError` if it can never run."""
        prompt, wanted = len(request.prompt), request.sampling.max_tokens
        if not prompt:
            raise InvalidRequestError(
                "a prompt needs at least one position, got none", param="prompt"
            )
        check_length(prompt, self.max_model_len, max(1, wanted))
        if request.prompt.atomic_bounds():
            raise InvalidRequestError(
                f"{self.engine} may cut a prompt anywhere; this one has rows that must stay "
                "together"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAdmission:
    """Checks of a prompt.

    Attributes:
        vocab_size: valid token ids are 0 to vocab_size - 1.
        hidden_size: elements of an embedding vector.
        dtype: dtype of embedding vectors, by torch's name.
        refuses_rows: why the model takes no embedding vectors, or None.
        media: of a model that takes images or the like, or None.
    """

    vocab_size: int
    hidden_size: int
    dtype: str
    refuses_rows: str | None
    media: MediaSpec | None = None

    @classmethod
    def of_prompts(cls, card: ModelCard) -> "PromptAdmission":
        """Build the checks from an engine's metadata."""
        return PromptAdmission(
            vocab_size=card.vocab_size,
            hidden_size=card.hidden_size,
            dtype=card.dtype,
            refuses_rows=card.prompt_embeds,
            media=card.media,
        )

    def check_prompt(self, prompt: Prompt, param: str = "prompt") -> None:
        """Raise `InvalidRequestError` if the model cannot read a position of `prompt`.

        `param` is the parameter's name in the API.
        """
        for segment in prompt.segments:
            if isinstance(segment, Tokens):
                self._check_ids(segment.ids, param)
            elif isinstance(segment, Rows):
                self._check_rows(segment)
            else:
                self._check_media(segment, param)

    def _check_rows(self, rows: Rows) -> None:
        if self.refuses_rows is not None:
            raise EmbeddingsError(f"this model takes no embeddings as prompt: {self.refuses_rows}")
        if rows.shape[1] != self.hidden_size:
            raise EmbeddingsError(
                f"the size of tensor must match the model's hidden size of {self.hidden_size}, got "
                f"{rows.shape[1]}",
                reason="shape",
            )
        if rows.dtype != self.dtype:
            raise EmbeddingsError(
                f"rows must have the model's dtype {self.dtype} here, got {rows.dtype}"
            )
        deepstack = 0 if self.media is None else self.media.deepstack
        allowed = {f"deepstack.{level}": (self.dtype, rows.shape) for level in range(deepstack)}
        if self.media is not None and self.media.mrope:
            allowed[GRID_FIELD] = "int32", (len(rows), 3)
        for field in rows.bundle:
            if field.name not in allowed:
                beside = f" but {', '.join(allowed)}" if allowed else ""
                raise EmbeddingsError(
                    f"this engine reads no further tensors with the rows{beside}, got {field.name}"
                )
            if (field.dtype, field.shape) != allowed[field.name]:
                dtype, shape = allowed[field.name]
                raise EmbeddingsError(
                    f"{field.name} of {len(rows)} rows must be {dtype} {shape}, got {field.dtype} "
                    f"{field.shape}"
                )

    def _check_media(self, run: Media, param: str) -> None:
        if self.media is None or not self.media.takes(run.kind):
            raise InvalidRequestError(f"this engine cannot read {run.kind}", param=param)
        if run.atomic != self.media.atomic or (run.grid is not None) != (
            self.media.mrope and run.kind != "audio"
        ):
            raise InvalidRequestError(
                f"{NAMED[run.kind]} was laid out for another family than {self.media.family!r}",
                param=param,
            )

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            wrong = next(id_ for id_ in ids if not 0 <= id_ < self.vocab_size)
            raise InvalidRequestError(
                f"token id {wrong} is not in the vocabulary: ids are 0 to {self.vocab_size - 1}",
                param=param,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission(PromptAdmission):
    """Checks of a generation request.

    An invalid request must not fail the step it would share with others.

    Attributes:
        bounds: length limits.
        max_logprobs: maximum number of alternatives per token.
        grammars: supported kinds of grammars.
        adapters: names of the loaded adapters.
        hidden_layers: the last of the layers whose hidden states it gives; None if it gives none.
        projected_size: elements of hidden states behind the projector; None without one.
    """

    bounds: LengthLimits
    max_logprobs: int
    grammars: tuple[GrammarKind, ...]
    adapters: Container[str] = ()
    hidden_layers: int | None = None
    projected_size: int | None = None

    @classmethod
    def of(
        cls, card: ModelCard, bounds: LengthLimits, *, adapters: Container[str] = ()
    ) -> "Admission":
        """Build the checks from an engine's metadata and its length limits."""
        return cls(
            bounds=bounds,
            vocab_size=card.vocab_size,
            hidden_size=card.hidden_size,
            dtype=card.dtype,
            max_logprobs=card.limits.max_logprobs,
            refuses_rows=card.prompt_embeds,
            grammars=card.grammars,
            adapters=adapters,
            media=card.media,
        )

    def check(self, request: Request) -> None:
        """Return if `request` can run.

        Raises:
            ContextLengthError: the prompt is too long, alone or with its output.
            EmbeddingsError: embedding vectors this model does not take.
            NotFoundError: the adapter is not loaded.
            InvalidRequestError: any other reason the request cannot be served.
        """
        if request.adapter is not None and request.adapter not in self.adapters:
            raise NotFoundError(f"the adapter {request.adapter!r} does not exist", param="model")
        self.bounds.check(request)
        self.check_prompt(request.prompt)
        self._check_ids(request.prior_output, "prior_output")
        sampling = request.sampling
        if len(request.prior_output) > sampling.max_tokens:
            raise InvalidRequestError(
                f"the earlier output has {len(request.prior_output)} tokens, and max_tokens is "
                f"{sampling.max_tokens}",
                param="max_tokens",
            )
        self._check_sampling(sampling)
        if sampling.grammar is not None:
            self._check_ids(sampling.grammar.after, "grammar")
            if sampling.grammar.kind not in self.grammars:
                raise InvalidRequestError(
                    f"a grammar of kind {sampling.grammar.kind!r} is not supported by this engine",
                    param="grammar",
                )
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(sampling, name)
            if asked is not None and not 0 <= asked <= self.max_logprobs:
                raise InvalidRequestError(
                    f"{name} may be 0 to {self.max_logprobs}, got {asked}", param=name
                )
        if sampling.prompt_logprobs is not None and request.prompt.has_rows:
            raise InvalidRequestError(
                "prompt_logprobs are not possible with prompt_embeds or media: rows have no token "
                "ids",
                param="prompt_logprobs",
            )

        if sampling.hidden_states is not None:
            self._check_hidden_states(sampling.hidden_states, len(request.prompt), sampling)

    def _check_hidden_states(self, asked: HiddenStates, prompt: int, sampling: Sampling) -> None:
        def refused(why: str) -> InvalidRequestError:
            return InvalidRequestError(f"hidden_states: {why}", param="hidden_states")

        if self.hidden_layers is None:
            raise refused("this engine gives none; the torch engine does")
        wrong = [layer for layer in asked.layers if not 0 <= layer <= self.hidden_layers]
        if wrong or not asked.layers or len(set(asked.layers)) < len(asked.layers):
            raise refused(
                f"layers are {list(asked.layers)}; allowed: at least one of 0 to "
                f"{self.hidden_layers}, each once"
            )
        if asked.prompt < -1 or asked.given < 0 or not (asked.prompt or asked.output):
            raise refused(
                f"prompt is {asked.prompt} without output; allowed: -1 for all of the prompt, a "
                "number of its last positions, or 0 with output"
                if not asked.output
                else f"prompt is {asked.prompt} and given {asked.given}; allowed: -1 and more, 0 "
                "and more"
            )
        positions = len(asked.positions(prompt, sampling.max_tokens))
        width = (asked.projected and self.projected_size) or self.hidden_size
        size = positions * len(asked.layers) * width * DTYPE_SIZES[self.dtype]
        if size > MAX_HIDDEN_STATES:
            raise refused(
                f"{positions} positions of {len(asked.layers)} layers may take {size} bytes; "
                f"allowed: {MAX_HIDDEN_STATES}"
            )

    def _check_sampling(self, sampling: Sampling) -> None:
        """Refuse settings with token ids outside the vocabulary."""
        allowed = sampling.allowed_token_ids
        if allowed is not None and not allowed:
            raise InvalidRequestError(
                "allowed_token_ids must not be empty", param="allowed_token_ids"
            )
        thinking = sampling.thinking
        named = {
            "logprob_token_ids": sampling.logprob_token_ids,
            "thinking_token_budget": () if thinking is None else (*thinking.start, *thinking.end),
            "logit_bias": sampling.logit_bias,
            "stop_token_ids": sampling.stop_token_ids,
            "allowed_token_ids": allowed or (),
            "bad_words": [id_ for word in sampling.bad_words for id_ in word],
        }
        for name, ids in named.items():
            wrong = [id_ for id_ in ids if not 0 <= id_ < self.vocab_size]
            if wrong:
                raise InvalidRequestError(
                    f"{name} names token id {wrong[0]}; the model's ids are 0 to "
                    f"{self.vocab_size - 1}",
                    param=name,
                )
        if thinking is not None and not (thinking.start and thinking.end):
            raise InvalidRequestError(
                "thinking_token_budget needs a start and an end of the thinking",
                param="thinking_token_budget",
            )
        if not all(sampling.bad_words):
            raise InvalidRequestError("bad_words must not hold an empty word", param="bad_words")
