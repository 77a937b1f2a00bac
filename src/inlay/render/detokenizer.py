"""Incremental detokenization: text of ids as they arrive.

Text that later ids could change is held back, and no other.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from inlay.render.vocabulary import Vocabulary

MAX_UNRESOLVED = 16
"""Ids that a `WindowDetokenizer` holds back while their text ends in U+FFFD."""


class Detokenizer(Protocol):
    """Text of a growing sequence of ids, in pieces.

    The joined results of `push` and `flush` equal the text of all ids decoded at once, however the
    ids are split among calls.
    """

    def push(self, ids: Sequence[int]) -> str:
        """Take ids and return the text that is final. The cost is linear in their number."""

    def flush(self) -> str:
        """Return the rest of the text at the end."""


class ByteLevelDetokenizer:
    """Detokenizer for byte-level vocabularies.

    It joins the tokens' bytes and holds back only an incomplete character. Invalid UTF-8 becomes
    U+FFFD by the rule of "maximal subparts" (Unicode 15, section 3.9), as in Python and Rust.
    """

    __slots__ = ("_held", "_skipped", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, *, skipped: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._held = b""

    def push(self, ids: Sequence[int]) -> str:
        if len(ids) == 1 and not self._held and ids[0] not in self._skipped:
            # The usual case of a stream; most tokens end with a character.
            whole = self._vocabulary.whole_texts.get(ids[0])
            if whole is None:
                whole = self._vocabulary.whole_text(ids[0])
            if whole is not None:
                return whole
        data, skipped = self._vocabulary.data, self._skipped
        known = b"".join([self._held, *[data(id_) for id_ in ids if id_ not in skipped]])
        # As `codecs.getincrementaldecoder`, without its layers: this is done for each token.
        text, used = codecs.utf_8_decode(known, "replace", False)
        self._held = known[used:]
        return text

    def flush(self) -> str:
        text, _ = codecs.utf_8_decode(self._held, "replace", True)
        self._held = b""
        return text


class WindowDetokenizer:
    """Detokenizer for all other vocabularies.

    It decodes the new tokens after the last token already shown, and cuts that token's text off.

    Such decoders treat tokens one by one, with two exceptions. The first token of a text may lose a
    space. A run of byte tokens is invalid as a whole if any part of it is, so it is held back until
    another token ends it.
    """

    __slots__ = ("_anchor", "_anchor_text", "_held", "_skipped", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, *, skipped: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._anchor: list[int] = []
        self._anchor_text = ""
        self._held: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        vocabulary, held = self._vocabulary, self._held
        settled = 0
        for id_ in ids:
            if id_ in self._skipped or vocabulary.token(id_) is None:
                continue
            held.append(id_)
            if id_ not in vocabulary.byte_ids:
                settled = len(held)
        if not settled:
            return ""
        new = self._decode(settled)
        if new.endswith("\ufffd") and len(held) < MAX_UNRESOLVED:
            return ""
        self._settle(settled)
        return new

    def flush(self) -> str:
        return self._decode(len(self._held)) if self._held else ""

    def _decode(self, count: int) -> str:
        """Return the text of the first `count` held ids."""
        window = self._anchor + self._held[:count]
        text = self._vocabulary.decode(window, skip_special_tokens=False)
        return text[len(self._anchor_text) :]

    def _settle(self, count: int) -> None:
        """Release the first `count` held ids.

        The last of them that has text becomes the anchor for decoding the next.
        """
        window = self._anchor + self._held[:count]
        start = len(window) - 1
        while start > 0 and not self._vocabulary.token(window[start]):
            start -= 1
        self._anchor = window[start:]
        if start == len(window) - 1:
            self._anchor_text = self._vocabulary.alone(window[start])
        else:
            self._anchor_text = self._vocabulary.decode(self._anchor, skip_special_tokens=False)
        del self._held[:count]


class UnspacedDetokenizer:
    """Detokenizer that shows consecutive added tokens without spaces between them; skips none."""

    __slots__ = ("_added", "_after_added", "_detokenizer")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._detokenizer = WindowDetokenizer(vocabulary, skipped=frozenset())
        self._added = vocabulary.added
        self._after_added = False

    def push(self, ids: Sequence[int]) -> str:
        text = ""
        for id_ in ids:
            shown, spelt = self._detokenizer.push((id_,)), self._added.get(id_)
            text += spelt if spelt is not None and self._after_added else shown
            self._after_added = spelt is not None
        return text

    def flush(self) -> str:
        return self._detokenizer.flush()
