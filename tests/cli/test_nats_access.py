"""Access to the server of `inlay nats`."""

from pathlib import Path

import pytest

from inlay.base.errors import InvalidRequestError
from inlay.cli.nats import is_local, public_key, wants_key
from inlay.cli.settings import NatsServerSettings


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.5", False),
        ("nats.example", False),
        ("", False),
    ],
)
def test_a_key_is_asked_for_where_other_machines_reach_the_server(host: str, local: bool) -> None:
    assert is_local(host) is local
    assert wants_key(NatsServerSettings(host=host), []) is not local


@pytest.mark.parametrize(
    "words",
    [["--user", "u"], ["-auth=x"], ["--tlsverify"], ["-c", "mine.conf"], ["--config=mine.conf"]],
)
def test_words_for_the_server_that_say_who_is_let_in_are_left_to_say_it(words: list[str]) -> None:
    exposed = NatsServerSettings(host="0.0.0.0")
    assert not wants_key(exposed, words)
    assert wants_key(exposed, ["--name", "user"])
    assert wants_key(exposed.model_copy(update={"credentials": True}), words)


def test_what_is_told_of_credentials_counts_before_what_is_guessed(tmp_path: Path) -> None:
    assert wants_key(NatsServerSettings(credentials=True), [])
    assert wants_key(NatsServerSettings(nats_nkey_seed=tmp_path / "seed"), [])
    assert not wants_key(NatsServerSettings(host="0.0.0.0", credentials=False), [])


def test_a_seed_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "members.nk"
    key = public_key(file)
    assert key.startswith("U")
    assert file.stat().st_mode & 0o777 == 0o600
    assert public_key(file) == key
    assert public_key(tmp_path / "other.nk") != key


@pytest.mark.parametrize("content", [b"", b"hello", b"S" * 58])
def test_a_file_that_has_no_seed_is_refused_and_left_as_it_is(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "members.nk"
    file.write_bytes(content)
    with pytest.raises(InvalidRequestError, match="has no nkey seed"):
        public_key(file)
    assert file.read_bytes() == content
    with pytest.raises(InvalidRequestError, match="cannot be made"):
        public_key(tmp_path / "missing" / "members.nk")
