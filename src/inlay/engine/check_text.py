"""The text whose numbers are compared with others: at a start, and while a worker serves."""

from pathlib import Path

from inlay.base.allocator import trim
from inlay.tensors.checkpoint import checkpoint_of

_TEXT = (
    "The capital of France is Paris. def add(a, b): return a + b  # 2 + 2 = 4, and so on; "
    "every morning she walks along the river to the old mill."
)


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
        from tokenizers import Tokenizer

        found = Tokenizer.from_buffer(form).encode(_TEXT).ids[:count]
    except ImportError:
        return ()
    except Exception:  # tokenizers raises nothing narrower
        # The frontend, which needs it, says what is wrong with it.
        return ()
    finally:
        trim()
    return tuple(found) if len(found) == count and max(found) < vocab_size else ()
