"""Limits on the embeddings and the JSON of one request, from the settings and the models."""

from collections.abc import Callable, Iterable

from inlay.card import EMBEDS_OFF, ModelCard
from inlay.errors import BodyTooLargeError, InvalidRequestError
from inlay.frontend.settings import AUTO, FrontendSettings
from inlay.prompt import DTYPE_SIZES
from inlay.tensors import ReadLimits

OVERHEAD_BYTES = 64 * 1024
"""Allowance for a container's bytes beside the elements.

Zip entries padded to 64 bytes, a header, metadata.
"""


class EmbedsLimits:
    """Limits of one server.

    Args:
        settings: of the frontend.
        models: returns the cards of the served models; `auto` depends on them.

    Attributes:
        max_prompts: maximum prompts in the batch of one tensor.
    """

    def __init__(
        self, settings: FrontendSettings, models: Callable[[], Iterable[ModelCard]]
    ) -> None:
        self._max_bytes = settings.max_prompt_embeds_bytes
        self._max_parts = settings.max_prompt_embeds_parts
        self._max_total = settings.max_request_embeds_bytes
        self._max_json = settings.max_json_bytes
        self._models = models
        self.max_prompts = settings.max_choices

    @property
    def off_everywhere(self) -> bool:
        """True if all models' workers were started without embeddings as prompts."""
        cards = list(self._models())
        return bool(cards) and all(card.prompt_embeds == EMBEDS_OFF for card in cards)

    def of(self, card: ModelCard) -> ReadLimits:
        """Return the limits of one tensor file for a model."""
        return ReadLimits(max_bytes=self._bytes(card))

    @property
    def any(self) -> ReadLimits:
        """Limits of a tensor file whose model is not known yet: the largest of all models."""
        if self._max_bytes != AUTO:
            return ReadLimits(max_bytes=self._max_bytes)
        return ReadLimits(max_bytes=max(map(self._bytes, self._models()), default=OVERHEAD_BYTES))

    def _bytes(self, card: ModelCard) -> int:
        if self._max_bytes != AUTO:
            return self._max_bytes
        rows = card.limits.max_model_len * card.hidden_size * DTYPE_SIZES[card.dtype]
        return rows + OVERHEAD_BYTES

    def check_count(self, count: int) -> None:
        """Raise `InvalidRequestError` if `count` embeddings are too many for one request."""
        if count > self._max_parts:
            raise InvalidRequestError(
                f"the request has {count} prompt_embeds; at most {self._max_parts} are allowed",
                param="prompt_embeds",
            )

    def check_total(self, num_bytes: int) -> None:
        """Raise `BodyTooLargeError` if a request's embeddings are too large, decoded."""
        if num_bytes > self._max_total:
            raise BodyTooLargeError(
                f"the prompt_embeds of the request come to {num_bytes} bytes; at most "
                f"{self._max_total} are allowed",
                param="prompt_embeds",
            )

    def check_json(self, num_bytes: int) -> None:
        """Raise `BodyTooLargeError` for too much JSON; extracted base64 strings do not count."""
        if num_bytes > self._max_json:
            raise BodyTooLargeError(
                f"the body has {num_bytes} bytes of JSON text or more, which is over the limit of "
                f"{self._max_json} bytes. Only strings of tensor data in base64 (`prompt_embeds`, "
                "`data`) of 64 KB or more do not count; other base64 is text"
            )
