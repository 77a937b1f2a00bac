"""Facts about stages, images and speech in the cards of workers."""

from collections.abc import Collection, Mapping

import msgspec

from inlay.base.errors import InvalidRequestError
from inlay.messages.card import ModelCard
from inlay_stages.feeds import Feed
from inlay_stages.graph import Graph


class StageCard(msgspec.Struct, frozen=True):
    """The stage that a worker is: an `inlay.messages.membership.Membership`.

    Attributes:
        graph: the pipeline, the same at all its workers.
        name: of the stage.
    """

    graph: Graph
    name: str

    @property
    def whole(self) -> str:
        return self.graph.name

    @property
    def identity(self) -> bytes:
        return self.graph.identity

    @property
    def outputs(self) -> Collection[str]:
        return self.graph.outputs

    @property
    def is_chain(self) -> bool:
        return bool(self.graph.before_text)

    @property
    def shares_adapters(self) -> bool:
        """As `Membership`: a file may have matrices of several stages that make images."""
        return self.graph.stages[self.name].kind in _OF_IMAGES

    def missing(self, served: Collection[str]) -> Mapping[str, str]:
        return self.graph.missing(served)


_OF_IMAGES = ("image", "encode", "denoise", "decode")


class ImageCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts about a model that makes images, or a part of one.

    Attributes:
        width: of an image unless a request says otherwise; then its height, in pixels.
        multiple: width and height are multiples of it.
        max_pixels: of an image.
        steps: unless a request says otherwise.
        max_steps: of a request.
        max_cost: steps of an image times its pixels; None: any.
        guidance: scale unless a request says otherwise; None: the model takes none.
        negative: it takes a negative prompt.
        empty_negative: guidance leads away from the empty prompt where a request has no other.
        padded: a prompt has as many positions as its negative prompt; of a text they are all.
        embeds: shape of each tensor that stands for a prompt; -1 is any number of positions, up to
            `Limits.max_model_len`.
        part: "pipeline" for all, else the part of it that the worker has.
        previews: it gives images so far, where they are asked for.
    """

    width: int
    height: int
    multiple: int
    max_pixels: int
    steps: int
    max_steps: int
    max_cost: int | None = None
    guidance: float | None = None
    negative: bool = False
    empty_negative: bool = False
    padded: bool = False
    embeds: dict[str, tuple[int, ...]] = {}
    part: str = "pipeline"
    previews: bool = True


def check_image_cost(
    width: int, height: int, steps: int, *, own: tuple[int, int], most: int | None
) -> None:
    """Refuse an image that costs more than its model's worker takes.

    Args:
        width: of the image, in pixels.
        height: likewise.
        steps: of the denoiser.
        own: width and height of the model's images unless a request says otherwise.
        most: steps times pixels at most; None: any.

    Raises `InvalidRequestError`, which says the cost in steps of the model's own size.
    """
    cost, unit = width * height * steps, own[0] * own[1]
    if most is not None and cost > most:
        raise InvalidRequestError(
            f"an image of {width}x{height} in {steps} steps costs {cost / unit:.4g} steps of the "
            f"model's own size, {own[0]}x{own[1]}; at most {most / unit:.4g} are allowed "
            "(--max-image-cost)",
            param="num_inference_steps",
        )


class AudioCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts about a model that speaks, or a part of one.

    Attributes:
        voices: their names.
        sample_rate: samples a second of its sound, which has one channel.
        samples_per_code: of the sound of one code.
        system: system message of the chats in which the family speaks; empty: none.
    """

    voices: tuple[str, ...]
    sample_rate: int
    samples_per_code: int
    system: str = ""


TYPES: Mapping[str, type] = {
    "stage": StageCard,
    "image": ImageCard,
    "audio": AudioCard,
    "feeds": Feed,
}
"""As `inlay.extension.Extension.types` names them."""


def stage_card(card: ModelCard) -> StageCard | None:
    """Return the stage that a card's worker is, or None."""
    return card.stage if isinstance(card.stage, StageCard) else None


def graph_of(card: ModelCard) -> Graph | None:
    """Return the pipeline that a card's worker is a stage of, or None."""
    return card.stage.graph if isinstance(card.stage, StageCard) else None


def image_card(card: ModelCard) -> ImageCard | None:
    """Return the facts about the images of a model, or None."""
    return card.image if isinstance(card.image, ImageCard) else None


def audio_card(card: ModelCard) -> AudioCard | None:
    """Return the facts about the speech of a model, or None."""
    return card.audio if isinstance(card.audio, AudioCard) else None


def check_adapter(card: ModelCard) -> None:
    """Refuse a LoRA adapter of a model that speaks. Raises `InvalidRequestError`."""
    if card.audio is not None:
        raise InvalidRequestError(
            f"`{card.name}` speaks: LoRA adapters are published of language models, and not of "
            "talkers and vocoders, which take none"
        )
