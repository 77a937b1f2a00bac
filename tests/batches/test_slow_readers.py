"""Clients that ask for what is kept and read it slowly, or not at all, or leave."""

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from inlay.store.kept.contents import PIECE_BYTES, PIECES_HELD
from inlay.store.settings import BatchSettings, ResponseSettings
from tests.batches.test_batches import client_of
from tests.live import Fleet, until
from tests.serving import peak_growth
from tests.state.test_responses import ASK

MIB = 1024 * 1024
SIZE = 24 * MIB
"""Of a file: more than the system's buffers of a connection take."""

SLOW = 3
HELD = PIECES_HELD * PIECE_BYTES


@pytest.fixture(scope="module")
def url(llama: Fleet, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A server at which a client may hold memory for as many slow readers, and a little more."""
    folder = tmp_path_factory.mktemp("slow")
    keys = folder / "keys.json"
    keys.write_text(json.dumps([{"key": f"key-of-{name}", "name": name} for name in "ab"]))
    return llama.serve(
        batches=BatchSettings(batch_store=str(folder / "store")),
        api_key_file=keys,
        max_client_bytes=SLOW * HELD + HELD // 2,
        max_body_bytes=HELD,
        max_json_bytes=HELD // 8,
        max_request_embeds_bytes=HELD // 8,
    )


@pytest.fixture(scope="module")
def file(url: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The id of a large file, and what it is."""
    path = tmp_path_factory.mktemp("file") / "large"
    with path.open("wb") as writing:
        for number in range(SIZE // MIB):
            writing.write(bytes([number]) * MIB)
    with path.open("rb") as reading, client_of(url, "key-of-a") as client:
        digest = hashlib.file_digest(reading, "sha256").hexdigest()
        reading.seek(0)
        return client.files.create(file=reading, purpose="user_data").id, digest


class Reader:
    """A connection that has read the head of an answer, and no more than it must."""

    def __init__(self, url: str, path: str, key: str) -> None:
        place = urlsplit(url)
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect((str(place.hostname), int(place.port or 0)))
        asked = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n"
        self.socket.sendall(asked.encode())
        self.read = b""
        while b"\r\n\r\n" not in self.read:
            self.read += self.socket.recv(512)
        head, _, self.read = self.read.partition(b"\r\n\r\n")
        self.status = int(head.split()[1])

    def digest(self, size: int) -> str:
        """Read the rest of a content of so many bytes; what all of it is."""
        found, left = hashlib.sha256(self.read), size - len(self.read)
        while left:
            data = self.socket.recv(1 << 16)
            found.update(data)
            left -= len(data)
        return found.hexdigest()


@contextmanager
def slow_readers(url: str, id_: str, count: int) -> Iterator[list[Reader]]:
    with ExitStack() as stack:
        readers = [Reader(url, f"/v1/files/{id_}/content", "key-of-a") for _ in range(count)]
        for reader in readers:
            stack.callback(reader.socket.close)
        yield readers


def whole(url: str, id_: str, key: str) -> str:
    """Read a file as fast as it comes; what it is."""
    found = hashlib.sha256()
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.stream("GET", f"{url}/v1/files/{id_}/content", headers=headers) as answer:
        assert answer.status_code == 200
        for data in answer.iter_bytes(1 << 16):
            found.update(data)
    return found.hexdigest()


def held(llama: Fleet, url: str) -> int:
    return llama.apps[url].server.budget.used


@pytest.mark.thorough
def test_slow_readers_of_a_file_hold_pieces_of_it_and_harm_nobody_else(
    llama: Fleet, url: str, file: tuple[str, str]
) -> None:
    id_, digest = file
    with client_of(url, "key-of-b") as other, peak_growth(os.getpid()) as grown:
        with slow_readers(url, id_, SLOW) as readers:
            assert [reader.status for reader in readers] == [200] * SLOW
            assert held(llama, url) == SLOW * HELD
            with client_of(url, "key-of-a") as client, pytest.raises(openai.RateLimitError):
                client.files.content(id_)
            answer = other.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=2
            )
            assert answer.choices
            small = other.files.create(file=("a", b"abc" * 1000), purpose="user_data").id
            assert whole(url, small, "key-of-b") == hashlib.sha256(b"abc" * 1000).hexdigest()
            # At last they read on.
            for reader in readers:
                assert reader.digest(SIZE) == digest
        until(lambda: held(llama, url) == 0)
        assert whole(url, id_, "key-of-a") == digest
    # A server that did not wait would hold all that it is to send.
    assert grown[0] < (SLOW - 1) * SIZE


def test_a_reader_that_leaves_gives_back_what_was_held_for_it(
    llama: Fleet, url: str, file: tuple[str, str]
) -> None:
    with slow_readers(url, file[0], SLOW):
        assert held(llama, url) == SLOW * HELD
    until(lambda: held(llama, url) == 0)


@pytest.mark.slow
def test_a_file_of_the_largest_size_goes_in_and_out_in_pieces(llama: Fleet, tmp_path: Path) -> None:
    """200 MB, as many as OpenAI takes, in less than 64 MiB."""
    url = llama.serve(batches=BatchSettings(batch_store=str(tmp_path / "store")))
    path, size = tmp_path / "large", 200_000_000
    with path.open("wb") as writing:
        writing.truncate(size)
    with path.open("rb") as reading, peak_growth(os.getpid()) as grown:
        sent = httpx.post(
            f"{url}/v1/files", data={"purpose": "user_data"}, files={"file": ("a", reading)},
            timeout=300,
        ).json()  # fmt: skip
        reading.seek(0)
        assert sent["bytes"] == size
        digest = hashlib.file_digest(reading, "sha256").hexdigest()
        assert whole(url, sent["id"], "any") == digest
    assert grown[0] < 64 * MIB


def test_a_slow_reader_of_a_stream_sees_all_and_keeps_nobody_waiting(
    llama: Fleet,
) -> None:
    kept_url = llama.serve(responses=ResponseSettings(response_store="memory"))
    with openai.OpenAI(base_url=kept_url + "/v1", api_key="k", max_retries=0) as client:
        made = client.responses.create(
            input="count", background=True, **{**ASK, "max_output_tokens": 60}
        )
        slow = Reader(kept_url, f"/v1/responses/{made.id}?stream=true", "k")
        quick = list(client.responses.retrieve(made.id, stream=True))
        found = slow.read
        while not found.endswith(b"0\r\n\r\n"):
            found += slow.socket.recv(256)
        slow.socket.close()
    assert [event.sequence_number for event in quick] == [*range(len(quick))]
    assert found.count(b'"sequence_number":') == len(quick)
    until(lambda: held(llama, kept_url) == 0)
