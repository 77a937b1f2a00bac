"""Late chunking: vectors of parts of a text, each the mean of positions that saw the whole text.

By vLLM's `late_chunking_params`, in parts of a number of tokens, or by Jina's `late_chunking`: the
texts of a request stand one after another, and each is a part. What stands before the first part,
as a prompt, belongs to it, and what stands behind the last to that, so one part is the whole text.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from inlay.api.openai.embeddings.encoding import About, EmbeddingAnswer, Encoding, json_answer
from inlay.api.openai.embeddings.gathering import Array, Gathered, normalized
from inlay.api.openai.embeddings.inputs import InputPiece, Inputs, TextInputs
from inlay.api.openai.embeddings.outputs import about_inputs
from inlay.api.openai.schema.embeddings import EmbeddingRequest
from inlay.base.errors import InvalidRequestError
from inlay.messages.pooling import CHUNKS
from inlay.render.texts import Range


@dataclass(frozen=True, slots=True)
class ChunkedTexts:
    """Texts, and where their chunks begin.

    Attributes:
        texts: with the characters of each position.
        size: tokens of a chunk; 0 where `ends` say.
        ends: of one text, the characters at which its parts end.
    """

    texts: TextInputs
    size: int
    ends: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.texts)

    def weight(self, index: int) -> int:
        return self.texts.weight(index)

    def pieces(self, start: int, stop: int) -> list[InputPiece]:
        found = self.texts.pieces(start, stop)
        return [piece._replace(spans=self._spans(piece)) for piece in found]

    def _spans(self, piece: InputPiece) -> tuple[int, ...]:
        assert piece.ranges is not None
        inside = [(place, each) for place, each in enumerate(piece.ranges) if each is not None]
        if self.size:
            starts = [place for place, _ in inside[:: self.size]] or [0]
        else:
            of_part: dict[int, int] = {}
            for place, (_, stop) in inside:
                # A token may begin with the space before its word.
                of_part.setdefault(bisect_right(self.ends, stop - 1), place)
            lacking = next((n for n in range(len(self.ends)) if n not in of_part), None)
            if lacking is not None:
                why = "lies beyond what is kept of all" if piece.truncated else "has no tokens"
                raise InvalidRequestError(f"input[{lacking}] {why}", param=f"input[{lacking}]")
            starts = [of_part[part] for part in range(len(self.ends))]
        return (0, *starts[1:], len(piece.prompt))


@dataclass(frozen=True, slots=True)
class LateChunking:
    """Late chunking as a request asks for it; `size` is 0 where each text is a part."""

    size: int

    @classmethod
    def of(cls, request: EmbeddingRequest) -> "LateChunking | None":
        """Return what a request asks for.

        Raises `InvalidRequestError` for fields that do not go together.
        """
        params = request.late_chunking_params
        if not request.late_chunking and params is None:
            return None
        for name in ("late_chunking" if params else "", "outputs", "store", "split_long_inputs"):
            if name and getattr(request, name):
                param = "late_chunking_params" if params else "late_chunking"
                raise InvalidRequestError(
                    f"{param} gives one vector of each part, so {name} does not go with it",
                    param=name,
                )
        return cls(params.chunk_size if params else 0)

    def inputs(self, given: Inputs) -> Inputs:
        """Return the texts of a request with their chunks. CPU work.

        Raises `InvalidRequestError` for what is no text.
        """
        if not isinstance(given, TextInputs):
            raise InvalidRequestError(
                "late chunking is of texts; token ids, chats and prompt_embeds have no characters",
                param="input",
            )
        texts = replace(given, ranges=True)
        if self.size:
            return ChunkedTexts(texts, self.size)
        # Each part has the space behind it.
        ends = [*accumulate(len(text) + 1 for text in texts.texts)]
        whole = replace(texts, texts=[" ".join(texts.texts)], params=("input",))
        return ChunkedTexts(whole, 0, ends)

    def answer(
        self,
        found: Sequence[Gathered],
        about: About,
        encoding: Encoding,
        dimensions: int | None,
        *,
        normalize: bool,
    ) -> EmbeddingAnswer:
        """Return the answer. CPU work."""

        def made(each: Gathered) -> Array:
            rows: Array = each.bundle[CHUNKS][:, :dimensions]
            return normalized(rows) if normalize else rows

        if self.size:
            shown = [encoding.vectors("embedding", made(each)) for each in found]
            for item, each in zip(shown, found, strict=True):
                item["late_chunking"] = {
                    "strategy": "fixed",
                    "chunk_size": self.size,
                    "input_tokens": len(each.piece.prompt),
                    "chunks": _chunks(each.piece),
                }
            return json_answer(shown, about, about_inputs(found))
        ((piece, _),) = found
        rows = made(found[0])
        chunks = _chunks(piece)
        parts = [
            encoding.vectors("embedding", row) | {"token_range": chunk["token_range"]}
            for row, chunk in zip(rows, chunks, strict=True)
        ]
        items = [
            {"input_tokens": stop - start, "truncated": False}
            for start, stop in pairwise(piece.spans)
        ]
        items[-1]["truncated"] = piece.truncated
        return json_answer(parts, about, items)


def _chunks(piece: InputPiece) -> list[dict[str, Any]]:
    assert piece.ranges is not None
    return [
        {"token_range": [start, stop], "char_range": _around(piece.ranges[start:stop])}
        for start, stop in pairwise(piece.spans)
    ]


def _around(ranges: Sequence[Range]) -> list[int] | None:
    known = [each for each in ranges if each is not None]
    return [known[0][0], known[-1][1]] if known else None
