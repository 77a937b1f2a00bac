"""The identity of media: the file, the encoder, the settings, and the index in the whole item."""

from inlay.messages.digest import BLOCK_SIZE, Chain, Secret, chain, media_digest, root_digest
from inlay.messages.prompt import Buffer, Media, Prompt, Rows, Tokens

SECRET = Secret(bytes(range(32)))
ROOT = root_digest(SECRET, weights_id="w", dtype="bfloat16")


def digest(data: bytes = b"file", settings: str = "", **changed: str) -> bytes:
    named = {"kind": "image", "encoder_id": "e", **changed}
    return media_digest(
        data, SECRET, kind=named["kind"], encoder_id=named["encoder_id"], settings=settings
    )


def test_an_item_is_named_by_everything_that_decides_its_rows() -> None:
    others = [
        digest(b"filf"),
        digest(settings="low"),
        digest(kind="audio"),
        digest(encoder_id="f"),
        digest(encoder_id="ee", kind="imag"),
        media_digest(b"file", Secret(bytes(32)), kind="image", encoder_id="e"),
    ]
    assert digest() == digest()
    assert len({digest(), *others}) == 1 + len(others)


def test_a_position_is_the_item_and_its_index_however_the_item_is_cut() -> None:
    whole = Media("image", digest(), 40, Buffer(b"file"), grid=(1, 8, 20), total=64)
    prompt = Prompt.of(Tokens(range(9)), whole)
    grown = Chain(ROOT, SECRET)
    for start, stop in ((0, 5), (5, 20), (20, 21), (21, 49)):
        grown.extend(prompt.slice(start, stop))
    assert grown.blocks == chain(prompt, ROOT, SECRET)
    later = Media("image", digest(), 40, start=1, total=64)
    assert chain(Prompt.of(later), ROOT, SECRET) != chain(Prompt.of(whole), ROOT, SECRET)


def test_media_atomic_or_not_are_no_rows_and_no_tokens() -> None:
    name = digest()
    media = Media("image", name, BLOCK_SIZE)
    rows = Rows(
        Buffer(bytes(4 * BLOCK_SIZE)), "float32", (BLOCK_SIZE, 1), digests=name * BLOCK_SIZE
    )
    tokens = Tokens([0] * BLOCK_SIZE)
    assert len({chain(Prompt.of(part), ROOT, SECRET)[0] for part in (media, rows, tokens)}) == 3
