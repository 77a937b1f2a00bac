"""What crosses NATS: packed messages, chunks, subjects, settings."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from inlay.prompt import Buffer
from inlay.transport.nats.mailbox import ALIGNMENT, pack, unpack
from inlay.transport.nats.notices import places
from inlay.transport.nats.settings import NatsSettings, shown
from inlay.transport.nats.subjects import Subjects, last_token, participant_id

senders = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=60)


@given(
    kind=st.integers(0, 255),
    sender=senders,
    header=st.binary(max_size=200),
    buffers=st.lists(st.binary(max_size=100), max_size=5),
)
def test_a_packed_message_is_unpacked_as_it_was(
    kind: int, sender: str, header: bytes, buffers: list[bytes]
) -> None:
    data = pack(kind, sender.encode(), header, list(map(Buffer, buffers)))
    got_kind, got_sender, got_header, got_buffers = unpack(data)
    assert (got_kind, got_sender, bytes(got_header)) == (kind, sender, header)
    assert [bytes(buffer.view) for buffer in got_buffers] == buffers


@given(
    data=st.binary(max_size=64),
    cut=st.integers(0, 200),
    header=st.binary(max_size=40),
    buffer=st.binary(max_size=40),
)
def test_what_is_no_packed_message_is_refused_and_nothing_else(
    data: bytes, cut: int, header: bytes, buffer: bytes
) -> None:
    whole = pack(0, b"somebody", header, [Buffer(buffer)])
    for broken in (data, whole[: min(cut, len(whole) - 1 - ALIGNMENT)]):
        try:
            unpack(broken)
        except msgspec.DecodeError:
            continue
        # Random bytes may be a message by chance; a cut one never is.
        assert broken is data


@given(sizes=st.lists(st.integers(0, 5000), max_size=6), chunk=st.integers(1, 700))
def test_chunks_tile_every_part_in_order(sizes: list[int], chunk: int) -> None:
    tiles = places(sizes, chunk)
    assert all(0 < stop - start <= chunk for _, start, stop in tiles)
    for part, size in enumerate(sizes):
        mine = [(start, stop) for owner, start, stop in tiles if owner == part]
        assert sum(stop - start for start, stop in mine) == size
        assert [start for start, _ in mine] == [0, *(stop for _, stop in mine)][: len(mine)]
    assert [owner for owner, _, _ in tiles] == sorted(owner for owner, _, _ in tiles)


def test_ids_of_participants_are_tokens_of_subjects_and_never_the_same() -> None:
    ids = {participant_id("worker") for _ in range(100)}
    assert len(ids) == 100
    for id_ in ids:
        assert not set(id_) & set(".*> \t")
        assert last_token(Subjects("fleet").messages(id_)) == id_


def test_namespaces_share_no_subject() -> None:
    one, other = Subjects("one"), Subjects("other")
    for name in ("cards", "namespace_facts"):
        assert getattr(one, name) != getattr(other, name)
    for name in ("messages", "chunks", "beats"):
        assert getattr(one, name)("x") != getattr(other, name)("x")


@pytest.mark.parametrize("namespace", ["", "a.b", "a b", "*", ">", "x" * 33])
def test_a_namespace_that_is_no_token_is_refused(namespace: str) -> None:
    with pytest.raises(ValidationError, match="letters, digits"):
        NatsSettings(namespace=namespace)


@pytest.mark.parametrize("url", ["127.0.0.1:4222", "http://host", "nats://"])
def test_a_url_of_no_nats_server_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match=f"a server is nats://HOST:PORT, got '{url}'"):
        NatsSettings(nats=[url])  # type: ignore[list-item]


def test_a_password_in_a_url_is_never_shown() -> None:
    settings = NatsSettings(nats=["nats://user:s3cret@host:4222", "tls://[::1]:5"])  # type: ignore[list-item]
    assert settings.shown_urls == "nats://host:4222, tls://[::1]:5"
    assert "s3cret" not in repr(settings)
    assert shown("nats://a:b@c") == "nats://c"
    assert shown("user:s3cret@c:1") == "c:1"
