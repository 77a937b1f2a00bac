"""Tokens, bytes and text of single ids."""

import codecs
import json
from functools import cached_property
from hashlib import blake2b

import msgspec
from tokenizers import Tokenizer

from inlay.base.errors import InvalidRequestError

_MAX_ID = 2**32


def _byte_level_alphabet() -> dict[str, int]:
    """Return the characters that represent bytes in byte-level vocabularies.

    Printable Latin-1 represents itself; the other bytes are U+0100 onwards.

    Source: the code of Radford et al., "Language models are unsupervised multitask learners"
    (2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }


_ALPHABET = _byte_level_alphabet()


class Vocabulary:
    """Vocabulary of a tokenizer, by single ids.

    Thread-safe: its caches only grow.

    Attributes:
        tokenizer: the tokenizer.
        added: tokens added to the vocabulary, special or not, by id.
        special: ids of special tokens.
        byte_level: True if the decoder joins the bytes of all tokens.
        byte_fallback: True if tokens like `<0xE2>` represent single bytes.
        whole_texts: results of `whole_text`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.added = {id_: token.content for id_, token in added.items()}
        self.special = frozenset(id_ for id_, token in added.items() if token.special)
        kinds = _decoder_kinds(tokenizer)
        self.byte_level = kinds == ["ByteLevel"]
        self.byte_fallback = "ByteFallback" in kinds
        self._tokens: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}
        self.whole_texts: dict[int, str | None] = {}
        self._alone: dict[int, str] = {}

    @cached_property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def identity(self) -> bytes:
        """A digest of all tokens and their ids: where it is equal, ids have one meaning."""
        tokens = sorted(self.tokenizer.get_vocab(with_added_tokens=True).items())
        return blake2b(msgspec.json.encode(tokens), digest_size=16).digest()

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """Bytes by id, for the ids that a decoder with byte fallback reads as single bytes."""
        if not self.byte_fallback:
            return {}
        ids = {
            self.tokenizer.token_to_id(f"<0x{byte:{form}}>"): byte
            for form in ("02x", "02X")
            for byte in range(256)
        }
        return {id_: byte for id_, byte in ids.items() if id_ is not None}

    def token(self, id_: int) -> str | None:
        """Return the token as the vocabulary spells it, or None."""
        known = self._tokens.get(id_)
        if known is None and 0 <= id_ < _MAX_ID:
            known = self.tokenizer.id_to_token(id_)
            if known is not None:
                self._tokens[id_] = known
        return known

    def data(self, id_: int) -> bytes:
        """Return the bytes of an id, which may be a part of a character; empty without a token."""
        known = self._bytes.get(id_)
        if known is None:
            token = self.token(id_)
            if token is None:
                return b""
            known = self._bytes[id_] = self._data(id_, token)
        return known

    def _data(self, id_: int, token: str) -> bytes:
        if self.byte_level:
            values = [_ALPHABET.get(character) for character in token]
            whole = [value for value in values if value is not None]
            return bytes(whole) if len(whole) == len(values) else token.encode()
        byte = self.byte_ids.get(id_)
        return self._in_context(id_).encode() if byte is None else bytes((byte,))

    def whole_text(self, id_: int) -> str | None:
        """Return the text of an id that stands between whole characters.

        None if its bytes end inside a character.
        """
        if id_ in self.whole_texts:
            return self.whole_texts[id_]
        data = self.data(id_)
        text, used = codecs.utf_8_decode(data, "replace", False)
        known = text if used == len(data) else None
        if data:
            self.whole_texts[id_] = known
        return known

    def text(self, id_: int) -> str:
        """Return the text of an id inside a text, with its leading space.

        It is U+FFFD for a part of a character.
        """
        return self.data(id_).decode("utf-8", "replace")

    def _in_context(self, id_: int) -> str:
        """Decode an id after another token, because decoders drop a text's first space."""
        anchor = self._anchor
        before = self.decode(anchor, skip_special_tokens=False)
        return self.decode((*anchor, id_), skip_special_tokens=False)[len(before) :]

    @cached_property
    def _anchor(self) -> tuple[int, ...]:
        ids = self.tokenizer.encode("a", add_special_tokens=False).ids
        return tuple(id_ for id_ in ids[-1:] if id_ not in self.byte_ids)

    def alone(self, id_: int) -> str:
        """Decode an id by itself, as the first of a text."""
        known = self._alone.get(id_)
        if known is None:
            known = self._alone[id_] = self.decode((id_,), skip_special_tokens=False)
        return known

    def decode(self, ids: "tuple[int, ...] | list[int]", *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`; ids without a token are ignored.

        Raises:
            InvalidRequestError: an id is negative or does not fit into 32 bits.
        """
        try:
            return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            wrong = next(id_ for id_ in ids if not 0 <= id_ < _MAX_ID)
            raise InvalidRequestError(
                f"token id {wrong} is not one; the vocabulary has {self.size}"
            ) from error


def _decoder_kinds(tokenizer: Tokenizer) -> list[str]:
    """Return the names of the decoder's steps, in order."""
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [step["type"] for step in steps]
