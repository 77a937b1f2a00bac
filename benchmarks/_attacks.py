"""The attacks of `benchmarks.attacks`, as data: each row says what is sent, and how.

A new one is one more `Attack` in `ATTACKS`.
"""

import json
import random
import struct
import time
import warnings
import zlib
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.embedding_models import tiny_embedding
from tests.engine.torch.test_grammar_trial import endless
from tests.media.hostile_files import chunk, many_scans, png_with
from tests.security.test_hostile_files import BOMBS, FILES, made

from benchmarks._attackers import (
    KEYS,
    Post,
    Send,
    aborted_uploads,
    going_on,
    leaving,
    nats_garbage,
    posting,
    scraping,
    sending,
    unproven,
)
from inlay import demo

_CHUNKED = (
    f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    f"authorization: Bearer {KEYS[0]}\r\ntransfer-encoding: chunked\r\n\r\n"
).encode()
_MANY_KEYS = 700_000
_MANY = 1_000_000


@dataclass(frozen=True)
class Attack:
    """One kind of harm.

    Attributes:
        name: of its row.
        sent: what is sent, in a few words.
        prepare: makes what is sent, before anything is measured.
        fleet: the server is a frontend, a worker and a NATS server, instead of one command.
        asked: what the second client asks for, by a number that no other request of its has.
        model: returns what is served.
        flags: further arguments of the server.
    """

    name: str
    sent: str
    prepare: Callable[[], Send]
    fleet: bool = False
    asked: "Callable[[int], Post]" = lambda _: _completion(prompt="the harbour")
    model: Callable[[], Path] = demo.model_dir
    flags: tuple[str, ...] = ()


def _json(path: str, **fields: Any) -> Post:
    return Post(path, json.dumps(fields).encode())


def _completion(**fields: Any) -> Post:
    return _json("/v1/completions", **{"prompt": "a", "max_tokens": 1, **fields})


def _chat(message: dict[str, Any] | None = None, **fields: Any) -> Post:
    said = {"role": "user", "content": "a", **(message or {})}
    return _json("/v1/chat/completions", messages=[said], max_tokens=1, **fields)


def _keys(value: object = 1, number_of: int = _MANY_KEYS) -> dict[str, object]:
    return {str(number): value for number in range(number_of)}


def _call_with_keys() -> Post:
    function = {"name": "f", "arguments": json.dumps(_keys())}
    calls = [{"id": "a", "type": "function", "function": function}]
    return _chat({"role": "assistant", "content": None, "tool_calls": calls})


def _hostile_files() -> Send:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        files = [*map(made, FILES), *(make() for make, _ in BOMBS.values())]
    return posting(*(_json("/v1/completions", max_tokens=1, prompt_embeds=one) for one in files))


def _stop_strings(length: int) -> Send:
    stops = [f"{number:04}" * (length // 4) for number in range(64)]
    return posting(_completion(stop=stops, n=24, max_tokens=64, ignore_eos=True))


def _grammars() -> Send:
    slow = [
        _completion(structured_outputs={"regex": "a?" * size + "a" * size})
        for size in range(4990, 5000)
    ]
    return posting(*slow, keys=KEYS)


def _compiled_grammars() -> Send:
    schemas = (json.loads(endless(f"p{number}").source) for number in range(40))
    slow = [_completion(structured_outputs={"json": schema}) for schema in schemas]
    return posting(*slow, keys=KEYS)


def _image(file: bytes, kind: str = "png") -> dict[str, Any]:
    url = f"data:image/{kind};base64,{b64encode(file).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _seeing(*files: bytes, kind: str = "png") -> Post:
    """A chat about images."""
    return _chat({"content": [*(_image(file, kind) for file in files), _TEXT]})


_TEXT = {"type": "text", "text": "What is it?"}


def _picture(number: int, side: int = 48) -> bytes:
    """A PNG of noise that no other number has."""
    source = random.Random(number)
    lines = b"".join(b"\0" + source.randbytes(3 * side) for _ in range(side))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _scans() -> Send:
    files = (many_scans((2800, 2800), 3000 + number) for number in range(4))
    return posting(*(_seeing(file, kind="jpeg") for file in files), connections=4)


def _profiles() -> Send:
    profile = chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 20)))
    files = (png_with(profile * (8000 + number)) for number in range(4))
    return posting(*map(_seeing, files), connections=4)


def _drawing(size: str, **fields: Any) -> Post:
    return _json("/v1/images/generations", prompt="a harbour", size=size, **fields)


def _waiting_prompts() -> Send:
    """Many prompts that share a beginning, more than there are pages for."""
    shared = list(range(100, 1700))
    posts = [_completion(prompt=[*shared, number], max_tokens=300) for number in range(64)]
    return posting(*posts, keys=KEYS, connections=16)


def _batches() -> Send:
    """Batches of blank lines, and of a line whose id is a million lists."""
    line = json.dumps({"custom_id": [[]] * _MANY, "method": "POST", "url": "/v1/completions"})
    head = 'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    file = 'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    body = f"--x\r\n{head}--x\r\n{file}{line}\n".encode() + b"\n" * 12_000_000 + b"{}\r\n--x--\r\n"
    upload = Post("/v1/files", body, "multipart/form-data; boundary=x")
    batch = {"endpoint": "/v1/completions", "completion_window": "24h"}
    return going_on(lambda _: upload, lambda id_: _json("/v1/batches", input_file_id=id_, **batch))


def _chain() -> Send:
    """Responses that go on with one another, each with thousands of empty parts."""
    parts = [{"type": "input_text", "text": ""}] * 3000
    item = [{"role": "user", "content": parts}]
    return going_on(
        lambda id_: _json(
            "/v1/responses", input=item, max_output_tokens=16, previous_response_id=id_
        )
    )


def _posts(*posts: Post) -> Callable[[], Send]:
    return lambda: posting(*posts)


def _large(field: str, make: Callable[[], Post]) -> Attack:
    return Attack(f"many keys: {field}", f"{_MANY_KEYS:,} keys", lambda: posting(make()))


ATTACKS: tuple[Attack, ...] = (
    Attack(
        "stop strings",
        "64 of 4,096 characters, n=24",
        lambda: _stop_strings(4096),
    ),
    Attack(
        "stop strings, allowed",
        "64 of 256 characters, n=24",
        lambda: _stop_strings(256),
    ),
    Attack(
        "grammars",
        "regex a?{5000}a{5000}, four keys; the second client wants small ones",
        _grammars,
        asked=lambda number: _completion(
            prompt="the harbour", structured_outputs={"regex": f"[ab]{number}"}
        ),
    ),
    Attack(
        "grammars, compiled",
        "schemas that pass the count and compile for minutes, four keys; the second client wants "
        "small grammars",
        _compiled_grammars,
        asked=lambda number: _completion(
            prompt="the harbour", structured_outputs={"regex": f"[ab]{number}"}
        ),
    ),
    Attack(
        "sequences",
        "n=128, max_tokens=1900, ignore_eos",
        _posts(_completion(n=128, max_tokens=1900, ignore_eos=True)),
    ),
    _large("logit_bias", lambda: _completion(logit_bias=_keys())),
    _large("metadata", lambda: _chat(metadata=_keys("a"))),
    _large("chat_template_kwargs", lambda: _chat(chat_template_kwargs=_keys())),
    _large("a tool call's arguments", _call_with_keys),
    _large("a message", lambda: _chat(_keys("a"))),
    Attack(
        "keys, allowed",
        "49,000 in chat_template_kwargs",
        lambda: posting(_chat(chat_template_kwargs=_keys(1, 49_000))),
    ),
    Attack(
        "white space, allowed",
        "16 MB before the object",
        lambda: posting(
            Post("/v1/completions", b" " * 16_000_000 + b'{"prompt":"a","max_tokens":1}')
        ),
    ),
    Attack(
        "white space",
        "60 MB before the object",
        lambda: posting(
            Post("/v1/completions", b" " * 60_000_000 + b'{"prompt":"a","max_tokens":1}')
        ),
    ),
    Attack(
        "/tokenize, refused",
        "60 MB of text",
        lambda: posting(_json("/tokenize", prompt="a b " * 15_000_000)),
    ),
    Attack(
        "truncate_prompt_tokens",
        "30 MB of text, 100 tokens kept",
        lambda: posting(_completion(prompt="a b " * 7_500_000, truncate_prompt_tokens=100)),
    ),
    Attack(
        "truncation, allowed",
        "16 MB of text, 100 tokens kept",
        lambda: posting(_completion(prompt="a b " * 4_000_000, truncate_prompt_tokens=100)),
    ),
    Attack(
        "long texts",
        "16 MB of text, 4 connections for each of four keys; the second client sends 20 KB",
        lambda: posting(
            _completion(prompt="a b " * 4_000_000, truncate_prompt_tokens=100),
            keys=KEYS,
            connections=4,
        ),
        asked=lambda number: _completion(
            prompt=f"{number} " + "a b " * 5_000, truncate_prompt_tokens=100
        ),
    ),
    Attack(
        "a million ids",
        "5 MB of JSON",
        lambda: posting(_completion(prompt=[5] * _MANY)),
    ),
    Attack(
        "a million strings",
        "5 MB of JSON",
        lambda: posting(_json("/v1/embeddings", input=["a"] * _MANY)),
    ),
    Attack(
        "aborted uploads",
        "64 at once, 8 MB announced, 200 KB sent",
        lambda: aborted_uploads(8_000_000, 200_000),
    ),
    Attack(
        "aborted uploads, small",
        "64 at once, 1,000 bytes announced, 100 sent",
        lambda: aborted_uploads(1000, 100),
    ),
    Attack(
        "large bodies",
        "10 MB of base64 that is no tensor",
        lambda: posting(
            _json("/v1/completions", prompt_embeds=b64encode(bytes(7_800_000)).decode())
        ),
    ),
    Attack(
        "small chunks",
        "a body in chunks of one byte, 8 connections",
        lambda: sending(_CHUNKED, b"1\r\n \r\n" * 10_000),
    ),
    Attack(
        "many headers",
        "15,000 in each head, 8 connections, no key",
        lambda: sending(b"", b"GET /live HTTP/1.1\r\n" + b"a:\r\n" * 15_000 + b"\r\n"),
    ),
    Attack(
        "requests in a row",
        "without waiting for answers, 8 connections, no key",
        lambda: sending(b"", b"GET /live HTTP/1.1\r\n\r\n" * 10_000),
    ),
    Attack("hostile files", f"{len(FILES) + len(BOMBS)} files, each refused", _hostile_files),
    Attack(
        "scans of a JPEG",
        "2,800 x 2,800 pixels in 3,000 scans, 4 connections; the second client sends an image",
        _scans,
        asked=lambda number: _seeing(_picture(number)),
        model=demo.vision_dir,
    ),
    Attack(
        "profiles in a PNG",
        "8,000 of 1 MB in 1 KB each, 4 connections; the second client sends an image",
        _profiles,
        asked=lambda number: _seeing(_picture(number)),
        model=demo.vision_dir,
    ),
    Attack(
        "one word",
        "15 MB without a space to an embedding model, 4 connections",
        lambda: posting(_json("/v1/embeddings", input="a" * 15_000_000), connections=4),
        asked=lambda number: _json("/v1/embeddings", input=f"the harbour {number}"),
        model=partial(tiny_embedding, "bert"),
    ),
    Attack(
        "a large drawing",
        "1024x1024 of a model of small images, 2 connections; the second client has a small one "
        "drawn",
        lambda: posting(_drawing("1024x1024"), connections=2),
        asked=lambda _: _drawing("auto"),
        model=lambda: demo.pipeline_dir() / "painter",
    ),
    Attack(
        "drawings that are left",
        "streams whose client leaves after 0.2 s, 8 connections; the second client has one drawn",
        lambda: leaving(lambda _: _drawing("auto", stream=True), after=0.2, connections=8),
        asked=lambda _: _drawing("auto"),
        model=lambda: demo.pipeline_dir() / "painter",
    ),
    Attack(
        "prompts that wait for pages",
        "64 that share 1,600 tokens, pages for two, four keys",
        _waiting_prompts,
        flags=("--kv-cache-memory-bytes", "8M"),
    ),
    Attack(
        "an image two wait for",
        "clients leave 50 ms after they asked for the image that the second client wants too",
        lambda: leaving(
            lambda _: _seeing(_picture(int(time.monotonic() * 2), 1500)), after=0.05, connections=4
        ),
        asked=lambda number: _seeing(_picture(number // 500_000_000, 1500)),
        model=demo.vision_dir,
    ),
    Attack(
        "lines of a batch",
        "12 MB of blank lines and a line whose id is a million lists",
        _batches,
        flags=("--batch-store", "memory", "--files-tenant-bytes", "256M"),
    ),
    Attack(
        "a chain of responses",
        "each goes on with the last and has 3,000 empty parts",
        _chain,
        flags=("--response-store", "memory"),
    ),
    Attack(
        "a rerank",
        "100,000 documents",
        lambda: posting(_json("/v1/rerank", query="a", documents=["the harbour"] * 100_000)),
        asked=lambda number: _json("/v1/embeddings", input=f"the harbour {number}"),
        model=partial(tiny_embedding, "bert"),
    ),
    Attack(
        "a rerank, allowed",
        "2,048 documents of 20 words; the second client wants vectors",
        lambda: posting(_json("/v1/rerank", query="a", documents=["the harbour " * 10] * 2048)),
        asked=lambda number: _json("/v1/embeddings", input=f"the harbour {number}"),
        model=partial(tiny_embedding, "bert"),
    ),
    Attack("/metrics", "24 connections, no key", lambda: scraping("/metrics", 24)),
    Attack(
        "connections without proof",
        "64 TLS connections to the worker, opened again when they are closed",
        lambda: unproven(64),
        fleet=True,
    ),
    Attack(
        "TLS handshakes",
        "64 connections to the worker, closed after the handshake and opened again",
        lambda: unproven(64, stay=False),
        fleet=True,
    ),
    Attack("NATS", "a subject that is not UTF-8", nats_garbage, fleet=True),
)
"""Every attack, in the order of the table."""
