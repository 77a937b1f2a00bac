"""`spaces_between_special_tokens`.

What a tokenizer puts between added tokens that follow each other.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from inlay.render import Renderer

WORDS = ["[UNK]", "the", "town", "##s"]


def renderer(directory: Path) -> Renderer:
    """A word-piece vocabulary, whose decoder puts a space before each token but the first."""
    tokenizer = Tokenizer(
        models.WordPiece({word: id_ for id_, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_tokens([AddedToken("<a>", special=True), AddedToken("<b>", special=True)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(
        directory
    )
    return Renderer.load(directory)


def shown(of: Renderer, ids: list[int], *, pushed: int, **settings: Any) -> str:
    """The text of `ids`, `pushed` of them at a time."""
    detokenizer = of.detokenizer(**settings)
    pieces = [detokenizer.push(ids[start : start + pushed]) for start in range(0, len(ids), pushed)]
    return "".join(pieces) + detokenizer.flush()


def test_special_tokens_that_follow_each_other_have_nothing_between_them_when_asked(
    tmp_path: Path,
) -> None:
    of = renderer(tmp_path)
    ids = [1, 4, 5, 4, 2, 3, 5]
    for pushed in (1, 2, 7):
        spaced = shown(of, ids, pushed=pushed, skip_special_tokens=False)
        assert spaced == "the <a> <b> <a> towns <b>"
        bare = shown(
            of, ids, pushed=pushed, skip_special_tokens=False, spaces_between_special_tokens=False
        )
        assert bare == "the <a><b><a> towns <b>"
        # As in vLLM, nothing changes where special tokens are skipped.
        skipped = shown(of, ids, pushed=pushed)
        assert (
            skipped
            == shown(of, ids, pushed=pushed, spaces_between_special_tokens=False)
            == "the towns"
        )
