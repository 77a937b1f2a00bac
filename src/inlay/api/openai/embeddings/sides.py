"""Sides of a comparison: texts, stored documents, embeddings and chats, mixed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from inlay.api.fields import check_depth
from inlay.api.generation.parts import in_content
from inlay.api.generation.truncation import Truncation
from inlay.api.openai.embeddings.gathering import Gathered, embedding_card
from inlay.api.openai.embeddings.inputs import Chats, Inputs, TextInputs
from inlay.api.openai.embeddings.outputs import comparable
from inlay.api.openai.embeddings.prompts import prompt_inputs
from inlay.api.openai.schema.scoring import Document
from inlay.api.openai.sources import embeds_source
from inlay.base.errors import InvalidRequestError
from inlay.base.pace import yield_gil
from inlay.embedding.cache import Bundle
from inlay.http.bodies.embeds import Embeddings, Source
from inlay.messages.card import EmbeddingCard
from inlay.messages.prompt import Prompt
from inlay.render import Renderer
from inlay.router import ServedModel

Item: TypeAlias = str | Document

_FORMS = ("text", "ref", "prompt_embeds", "content")


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Attributes:
        items: a text as a string, whatever form it came in.
        param: field of the request that they stand in.
        single: True if that field is the only item, not a list.
    """

    items: Sequence[Item]
    param: str
    single: bool

    @classmethod
    def of(cls, given: Item | Sequence[Item], param: str) -> "Side":
        """Return what a field of a request holds.

        Raises:
            InvalidRequestError: nothing, an empty text, or an item that has not exactly one form.
        """
        side = cls(_items(given), param, isinstance(given, str | Document))
        if not side.items:
            raise InvalidRequestError(f"{param} must not be empty", param=param)
        items = [_plain(item, place, side) for place, item in enumerate(side.items)]
        if "" in items:
            raise InvalidRequestError(
                f"{param} holds an empty string, which has no score", param=param
            )
        return cls(items, param, side.single)

    def path(self, place: int) -> str:
        """Return the path in the request of an item."""
        return self.param if self.single else f"{self.param}[{place}]"

    def texts(self, model: str) -> list[str]:
        """Return the items of a model of pairs of texts.

        Raises `InvalidRequestError` for one that is no text.
        """
        for place, item in enumerate(self.items):
            if isinstance(item, Document):
                raise InvalidRequestError(
                    f"{self.path(place)} has {_form_of(item)}; the model `{model}` reads pairs of "
                    "texts",
                    param=self.path(place),
                )
        return [item for item in self.items if isinstance(item, str)]

    def check(self, of_texts: Sequence[str]) -> None:
        """Check the items that are no texts. CPU work.

        Args:
            of_texts: fields that the request gives, and that change texts alone.

        Raises:
            InvalidRequestError: there is one beside such a field, or one nested too deep.
        """
        for place, item in enumerate(self.items):
            if isinstance(item, str):
                continue
            if of_texts:
                raise InvalidRequestError(
                    f"{of_texts[0]} is of texts, and {self.path(place)} has {_form_of(item)}, "
                    "which is taken as it is: leave one of them out",
                    param=of_texts[0],
                )
            if item.content is not None:
                check_depth(item.content, f"{self.path(place)}.content")

    @property
    def refs(self) -> dict[str, str]:
        """Path in the request of each stored document."""
        found: dict[str, str] = {}
        for place, item in enumerate(self.items):
            if isinstance(item, Document) and item.ref is not None:
                found.setdefault(item.ref, self.path(place))
        return found


def _items(given: Item | Sequence[Item]) -> Sequence[Item]:
    return [given] if isinstance(given, str | Document) else given


def _plain(item: Item, place: int, side: Side) -> Item:
    if isinstance(item, str):
        return item
    given = [name for name in _FORMS if getattr(item, name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"{side.path(place)}: give exactly one of {', '.join(_FORMS)}, got "
            f"{' and '.join(given) or 'none'}",
            param=side.path(place),
        )
    text = item.content if isinstance(item.content, str) else item.text
    return item if text is None else text


def _form_of(item: Document) -> str:
    return next(name for name in _FORMS if getattr(item, name) is not None)


def in_fields(request: object, *names: str) -> list[Source]:
    """Return the sources of embeddings and media in fields of items, in order."""
    found: list[Source] = []
    fields = [(name, getattr(request, name)) for name in names]
    each = [
        (item, name if isinstance(given, Document) else f"{name}[{place}]")
        for name, given in fields
        if given is not None
        for place, item in enumerate(_items(given))
    ]
    for prompt, (item, path) in enumerate(each):
        if isinstance(item, str):
            continue
        if item.prompt_embeds is not None:
            found.append(embeds_source(item.prompt_embeds, f"{path}.prompt_embeds"))
        elif item.content is not None:
            found += in_content(item.content, f"{path}.content", prompt)
    return found


@dataclass(frozen=True)
class ToCompute:
    """Inputs of a side that have to be computed.

    Attributes:
        side: that they are of.
        inputs: of several kinds.
        places: of each input in the side.
        role: of the side.
    """

    side: Side
    role: str
    inputs: list[Inputs] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.places)

    def bundles(
        self,
        found: Sequence[Gathered],
        stored: Mapping[str, Bundle],
        name: str,
        card: EmbeddingCard,
    ) -> list[Bundle]:
        """Return an output of all items, as similarity takes it. CPU work.

        Args:
            found: what the model gives for the inputs.
            stored: documents of the side, by reference.
            name: of the output.
            card: of the model.
        """
        computed = {}
        for place, each in zip(self.places, found, strict=True):
            yield_gil()
            computed[place] = comparable(each, (name,), card, self.role)
        return [
            stored[item.ref]
            if isinstance(item, Document) and item.ref is not None
            else computed[place]
            for place, item in enumerate(self.side.items)
        ]


@dataclass(frozen=True)
class Reading:
    """Makes inputs of both sides of a request.

    Attributes:
        model: that computes them.
        renderer: of the model.
        cut: truncation of the request.
        embeddings: of the request.
    """

    model: ServedModel
    renderer: Renderer
    cut: Truncation
    embeddings: Embeddings

    def inputs(self, side: Side, role: str, prefix: str, clip: int) -> ToCompute:
        """Return the inputs of a side that are not stored. CPU work.

        Args:
            side: of the request.
            role: of its texts.
            prefix: before its texts.
            clip: first tokens of each text that are kept; 0 for all.

        Raises:
            InlayError: an item that the model does not take.
        """
        card = embedding_card(self.model)
        self._check_forms(side, role, card)
        found = ToCompute(side, role)
        places = [n for n, item in enumerate(side.items) if isinstance(item, str)]
        if places:
            texts = TextInputs(
                [item for item in side.items if isinstance(item, str)],
                self.renderer,
                self.cut,
                prefixes=(prefix,),
                lower_case=card.lower_case,
                params=tuple(map(side.path, places)),
                clips=[clip] * len(places) if clip else (),
                form=card.roles.get(role),
            )
            self._add(found, texts, places)
        embeds = {
            place: embeds_source(item.prompt_embeds, f"{side.path(place)}.prompt_embeds")
            for place, item in enumerate(side.items)
            if isinstance(item, Document) and item.prompt_embeds is not None
        }
        if embeds:
            prompts = [Prompt.of(self.embeddings.one(source)) for source in embeds.values()]
            paths = [source.param for source in embeds.values()]
            self._add(found, prompt_inputs(prompts, self.cut, paths), [*embeds])
        contents = {
            place: item.content
            for place, item in enumerate(side.items)
            if isinstance(item, Document) and item.content is not None
        }
        if contents:
            self._add(found, self._chats(side, contents, card), [*contents])
        return found

    def _check_forms(self, side: Side, role: str, card: EmbeddingCard) -> None:
        """Raise `InvalidRequestError` for rows or a chat in a role that has weights for ids."""
        form = card.roles.get(role)
        if form is None or form.static is None:
            return
        for place, item in enumerate(side.items):
            if isinstance(item, Document) and item.ref is None:
                raise InvalidRequestError(
                    f"{side.path(place)} has {_form_of(item)}; the model `{self.model.name}` "
                    f"reads texts alone in the role {role}",
                    param=side.path(place),
                )

    def _add(self, found: ToCompute, inputs: Inputs, places: Sequence[int]) -> None:
        found.inputs.append(inputs)
        found.places.extend(places)

    def _chats(self, side: Side, contents: Mapping[int, Any], card: EmbeddingCard) -> Chats:
        paths = [side.path(place) for place in contents]
        if card.lower_case:
            raise InvalidRequestError(
                f"the model `{self.model.name}` lowers its texts, which is not done to parts",
                param=paths[0],
            )
        chats = [[{"role": "user", "content": content}] for content in contents.values()]
        return Chats(
            chats,
            paths,
            self.renderer,
            self.cut,
            self.embeddings,
            self.model.card,
            add_generation_prompt=False,
            continue_final_message=False,
            template_kwargs={},
            special=False,
            bare=True,
        )
