"""The text whose numbers are compared with others: at a start, and while a worker serves.

To read a tokenizer of 150,000 tokens takes 0.4 s, in which no other thread runs Python. So the ids
are kept: in the process, and those of large tokenizers in the user's cache.
"""

from contextlib import suppress
from pathlib import Path

import msgspec
from blake3 import blake3

from inlay.base.allocator import trim
from inlay.base.user_cache import keep, user_cache
from inlay.tensors.checkpoint import checkpoint_of

_TEXT = (
    "The capital of France is Paris. def add(a, b): return a + b  # 2 + 2 = 4, and so on; "
    "every morning she walks along the river to the old mill."
)

_LARGE = 1 << 20
"""Bytes of a `tokenizer.json` from which on ids are kept in the user's cache."""

_known: dict[str, tuple[int, ...]] = {}
"""Ids of the text by the digest of all that they depend on."""


def text_ids(directory: Path, vocab_size: int, count: int) -> tuple[int, ...]:
    """Return the first `count` token ids of the text; none if the tokenizer has no such ids.

    Args:
        directory: of a model; without a `tokenizer.json` it has none.
        vocab_size: ids are below it.
        count: number of ids.
    """
    form = checkpoint_of(directory).file("tokenizer.json")
    if form is None:
        return ()
    try:
        # A worker of another interpreter may have none.
        import tokenizers
    except ImportError:
        return ()
    digest = blake3(form)
    digest.update(f"{tokenizers.__version__} {_TEXT}".encode())
    key = digest.hexdigest(16)
    if key not in _known:
        with suppress(OSError, msgspec.MsgspecError):
            data = (user_cache("tokenizers") / f"{key}.ids").read_bytes()
            found = msgspec.json.decode(data, type=tuple[int, ...])
            if found and min(found) >= 0:
                _known[key] = found
    if key not in _known:
        try:
            _known[key] = tuple(tokenizers.Tokenizer.from_buffer(form).encode(_TEXT).ids)
        except Exception:  # tokenizers raises nothing narrower
            # The frontend, which needs it, says what is wrong with it.
            return ()
        finally:
            trim()
        if len(form) >= _LARGE:
            with suppress(OSError):  # they are made again
                keep(user_cache("tokenizers") / f"{key}.ids", msgspec.json.encode(_known[key]))
    ids = _known[key][:count]
    return ids if len(ids) == count and max(ids) < vocab_size else ()
