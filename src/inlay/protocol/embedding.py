"""Texts to vectors: what workers are told, what they answer, and what an engine of it is.

Vectors leave an engine as they come out of the model's pooling and dense layers: float32, not normalised, not shortened. Both are
cheap, and whoever answers clients does them: one result then serves every `dimensions`, every format and every cache.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec

from inlay.errors import ErrorFrame
from inlay.prompt import Buffer, Prompt


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Texts, or pairs of texts, to be embedded or scored together; one answer holds the vectors of all.

    Attributes:
        id: unique among the requests in flight of a frontend.
        attempt: counts up when the request is sent again; answers of older attempts are dropped.
        prompts: the texts with the special tokens around them; rows are in the model's activation dtype.
        second_from: of each prompt that is a pair, the position from which on it is the second text (token type 1); empty where
            they are no pairs.
        adapter: name of the adapter, or None.
        salt: the tenant, where tenants share nothing.
        deadline: seconds the request may still take when it is sent, or None.
        priority: lower is sooner, as in vLLM.
    """

    id: str
    prompts: tuple[Prompt, ...]
    attempt: int = 0
    second_from: tuple[int, ...] = ()
    adapter: str | None = None
    salt: str | None = None
    deadline: float | None = None
    priority: int = 0

    @property
    def positions(self) -> int:
        """Positions of all prompts."""
        return sum(map(len, self.prompts))


class EmbedOutput(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The answer to an `EmbedRequest`, in one piece.

    Attributes:
        request_id: of the request.
        attempt: of the request.
        data: float32 [prompts of the request, size], C order, little endian, all finite; empty with an error.
        size: elements of a vector; of a scoring model, its labels, as logits.
        prompt_tokens: positions computed.
        error: why there are none.
    """

    request_id: str
    attempt: int
    data: Buffer
    size: int = 0
    prompt_tokens: int = 0
    error: ErrorFrame | None = None


EmitEmbedOutput: TypeAlias = Callable[[EmbedOutput], None]
"""Takes an answer on the event loop the engine was started on; must not block."""


class EmbeddingCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker says of a model that makes vectors.

    Attributes:
        size: elements of a vector; of a scoring model, its labels.
        normalize: vectors have length 1 unless a client asks otherwise.
        any_dimensions: a vector may be shortened to any number of its first elements.
        dimensions: the numbers of elements it may be shortened to, where not to any.
        prompts: what is put before a text, by name ("query", "document").
        default_prompt: name of the one that is put before texts of requests that name none.
        lower_case: texts are lowered before they are tokenized.
        unit: vectors leave the engine with length 1 already: requests that want another are refused.
        activation: what makes scores of a scoring model's logits: "sigmoid", "softmax", "tanh" or "identity".
        labels: of a scoring model, what its labels are called; empty where nobody says.
    """

    size: int
    normalize: bool = True
    any_dimensions: bool = False
    dimensions: tuple[int, ...] = ()
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    lower_case: bool = False
    unit: bool = False
    activation: str = "identity"
    labels: tuple[str, ...] = ()


@runtime_checkable
class EmbeddingEngine(Protocol):
    """An engine of `Task.EMBED` or `Task.SCORE`."""

    def embed(self, request: EmbedRequest, emit: EmitEmbedOutput) -> None:
        """Admit `request`. Exactly one answer goes to `emit`, also after `Engine.abort`.

        Raises:
            InvalidRequestError: it can never run here; nothing was admitted.
            OverloadedError: too much is waiting already.
        """
        ...
