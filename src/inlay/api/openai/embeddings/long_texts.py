"""Texts beyond the model's limit: read in pieces, whose outputs become those of the whole text.

Pieces follow one another, each with the prompt and the special tokens of a text. One vector is the
mean of the pieces' by their positions: of mean pooling, and layers that are linear behind it, that
is exactly the mean of all positions. Sparse weights are the largest of all pieces, or their sum
where the model sums, which is exact by definition; vectors of tokens stand one after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np

from inlay.api.openai.embeddings.gathering import Gathered
from inlay.api.openai.embeddings.inputs import InputPiece, Inputs, TextInputs
from inlay.api.openai.schema.embeddings import EmbeddingRequest
from inlay.base.errors import InvalidRequestError
from inlay.embedding.cache import Bundle
from inlay.embedding.static import sparse
from inlay.messages.card import EmbeddingCard
from inlay.messages.prompt import Prompt

_CHARACTERS = 8
"""Characters for each token of a piece among which its end is looked for."""


@dataclass
class LongTexts:
    """Splits texts, and joins what their pieces get.

    Attributes:
        card: of the model.
        max_active: weights that are kept of a sparse vector; 0 for all.
        most: pieces that a request may have.
    """

    card: EmbeddingCard
    max_active: int
    most: int
    _starts: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, request: EmbeddingRequest, card: EmbeddingCard, most: int) -> "LongTexts | None":
        """Return what a request asks for.

        Raises `InvalidRequestError` where it also cuts texts, or stores what they get.
        """
        if not request.split_long_inputs:
            return None
        if request.store:
            raise InvalidRequestError(
                "split_long_inputs is of vectors in an answer; texts that are stored fit the model",
                param="split_long_inputs",
            )
        if request.auto_truncate or request.truncate_prompt_tokens is not None:
            raise InvalidRequestError(
                "split_long_inputs reads all of a text, so no truncation goes with it",
                param="split_long_inputs",
            )
        return cls(card, request.max_active or 0, most)

    def inputs(self, given: Inputs) -> Inputs:
        """Return the pieces of texts as inputs. CPU work.

        Raises `InvalidRequestError` for what is no text, and for too many pieces.
        """
        if not isinstance(given, TextInputs):
            raise InvalidRequestError(
                "split_long_inputs is of texts; token ids, chats and prompt_embeds are not split",
                param="split_long_inputs",
            )
        # Of the server's own truncation either.
        given = replace(given, cut=given.cut._replace(keep=None))
        texts, params = [], []
        for index, text in enumerate(given.texts):
            prefix = given.prefixes[index if len(given.prefixes) > 1 else 0]
            room = given.room(prefix)
            param = given.params[index] if given.params else f"input[{index}]"
            starts = [0]
            for part in _parts(text, prefix, room, given):
                texts.append(part)
                params.append(param)
                starts.append(starts[-1] + len(part))
                if len(texts) > self.most:
                    raise InvalidRequestError(
                        f"the inputs have over {self.most} pieces of {room} tokens; at most as "
                        "many are allowed (--max-embedding-inputs)",
                        param=param,
                    )
            self._starts.append(starts)
        prefixes = given.prefixes
        if len(prefixes) > 1:
            each = zip(prefixes, self._starts, strict=True)
            prefixes = tuple(one for one, starts in each for _ in starts[1:])
        return replace(given, texts=texts, params=tuple(params), prefixes=prefixes)

    def joined(self, found: Sequence[Gathered]) -> list[Gathered]:
        """Return what each text gets. CPU work."""
        pieces = iter(found)
        whole = []
        for starts in self._starts:
            own = [next(pieces) for _ in starts[1:]]
            piece = own[0].piece
            if len(own) > 1:
                piece = _piece([each.piece for each in own], starts)
            elif not self.max_active:
                whole.append(own[0])
                continue
            whole.append(Gathered(piece, self._bundle(own)))
        return whole

    def about(self, place: int) -> dict[str, Any]:
        """Return what an item says of a text that was split."""
        starts = self._starts[place]
        if len(starts) == 2:
            return {}
        dense = next((each for each in self.card.outputs if each.name == "dense"), None)
        ranges = [[*each] for each in pairwise(starts)]
        return {"pieces": ranges, "approximate": dense is not None and not dense.linear}

    def _bundle(self, own: Sequence[Gathered]) -> Bundle:
        made: dict[str, Any] = {}
        bundles = [each.bundle for each in own]
        for name in bundles[0]:
            arrays = [bundle[name] for bundle in bundles]
            if name == "dense":
                counts = [len(each.piece.prompt) for each in own]
                mean = np.average(np.stack(arrays).astype(np.float64), axis=0, weights=counts)
                made[name] = mean.astype(np.float32)
            elif name == "sparse.indices":
                made |= self._sparse(bundles)
            elif name != "sparse.values":
                made[name] = np.concatenate(arrays)
        return made

    def _sparse(self, bundles: Sequence[Bundle]) -> Bundle:
        output = next(each for each in self.card.outputs if each.name == "sparse")
        indices = np.concatenate([bundle["sparse.indices"] for bundle in bundles])
        values = np.concatenate([bundle["sparse.values"] for bundle in bundles])
        ids, places = np.unique(indices, return_inverse=True)
        weights = np.zeros(len(ids), np.float32)
        join = np.add if output.pooling == ("sum",) else np.maximum
        join.at(weights, places, values)
        return sparse(ids, weights, self.max_active)


def _parts(text: str, prefix: str, room: int, given: TextInputs) -> list[str]:
    """Return a text as parts of at most `room` tokens, between words where there are any."""
    form = given.form
    if form is not None and (form.at_least or form.suffix or form.static is not None):
        return [text]
    found, at = [], 0
    while at < len(text):
        # A part of the rest, so that a long text is not copied, or tokenized, for each piece.
        rest = text[at : at + _CHARACTERS * room]
        most = room
        while most > 0:
            part = given.renderer.clipped([rest], [most])[0]
            if at + len(part) < len(text):
                between = max(part.rfind(" "), part.rfind("\n"))
                part = part[:between] if between > len(part) // 2 else part
            # Behind a prompt, or in lower case, it may have more tokens.
            over = given.over(prefix, part)
            if not over:
                break
            most -= max(1, over // 2)
        if most < 1 or not part:
            raise InvalidRequestError("a token of the text has more characters than fit")
        found.append(part)
        at += len(part)
    return found


def _piece(pieces: Sequence[InputPiece], starts: Sequence[int]) -> InputPiece:
    """Return the pieces of one text as one; ranges are of the whole."""
    ranges = None
    if pieces[0].ranges is not None:
        ranges = [
            None if each is None else (start + each[0], start + each[1])
            for piece, start in zip(pieces, starts, strict=False)
            for each in piece.ranges or ()
        ]
    segments = chain.from_iterable(piece.prompt.segments for piece in pieces)
    return InputPiece(
        Prompt.of(*segments),
        ranges=ranges,
        begins=tuple(accumulate((len(piece.prompt) for piece in pieces[:-1]), initial=0)),
    )
