"""How much embeddings one request may bring, by the settings and by the model."""

from collections.abc import Callable, Iterable

from inlay.card import EMBEDS_OFF, ModelCard
from inlay.errors import BodyTooLargeError, InvalidRequestError
from inlay.frontend.settings import AUTO, FrontendSettings
from inlay.prompt import DTYPE_SIZES
from inlay.tensors import ReadLimits

OVERHEAD_BYTES = 64 * 1024
"""What a container may hold beside the elements.

Zip entries padded to 64 bytes, a header, metadata.
"""


class EmbedsLimits:
    """The limits of one server.

    Args:
        settings: of the frontend.
        models: the cards of the models served now; `auto` depends on them.

    Attributes:
        max_prompts: prompts in the batch of one tensor.
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
        """The limits of one tensor file for a model."""
        return ReadLimits(max_bytes=self._bytes(card))

    @property
    def any(self) -> ReadLimits:
        """The limits of a tensor file whose model is not known yet.

        Those of the model that takes the most.
        """
        if self._max_bytes != AUTO:
            return ReadLimits(max_bytes=self._max_bytes)
        return ReadLimits(max_bytes=max(map(self._bytes, self._models()), default=OVERHEAD_BYTES))

    def _bytes(self, card: ModelCard) -> int:
        if self._max_bytes != AUTO:
            return self._max_bytes
        rows = card.limits.max_model_len * card.hidden_size * DTYPE_SIZES[card.dtype]
        return rows + OVERHEAD_BYTES

    def check_count(self, count: int) -> None:
        """Raise `InvalidRequestError` when a request may not have `count` embeddings, however they are given."""
        if count > self._max_parts:
            raise InvalidRequestError(
                f"the request has {count} prompt_embeds; at most {self._max_parts} are allowed",
                param="prompt_embeds",
            )

    def check_total(self, num_bytes: int) -> None:
        """Raise `BodyTooLargeError` when the embeddings of a request may not come to `num_bytes` decoded bytes."""
        if num_bytes > self._max_total:
            raise BodyTooLargeError(
                f"the prompt_embeds of the request come to {num_bytes} bytes; at most {self._max_total} are allowed",
                param="prompt_embeds",
            )

    def check_json(self, num_bytes: int) -> None:
        """Raise `BodyTooLargeError` when a request may not have `num_bytes` of JSON, its long base64 strings not counted."""
        if num_bytes > self._max_json:
            raise BodyTooLargeError(
                f"the body has {num_bytes} bytes of JSON text or more, which is over the limit of "
                f"{self._max_json} bytes. Only strings of tensor data in base64 (`prompt_embeds`, "
                "`data`) of 64 KB or more do not count; other base64 is text"
            )
