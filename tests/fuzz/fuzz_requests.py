"""Fuzz what takes requests in.

A body is refused with an `InlayError`, or becomes prompts and samplings an engine may be given.

    python -m tests.fuzz.fuzz_requests completions --executions 1000000 [--seed 1]
    python -m tests.fuzz.fuzz_requests chat --atheris FOLDER -runs=10000000 -max_len=4096

Every body goes in twice, once in pieces, with its base64 lifted out, and once through the full
parser alone: both must end alike. The first form needs nothing but mutates blindly; the second is
guided by coverage, needs `atheris` and takes libFuzzer's options; FOLDER receives what reaches
something new. `--make-corpus` writes the bodies mutation starts from.
"""

import argparse
import asyncio
import base64
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Protocol, get_args
from zlib import crc32

import msgspec
import numpy as np

from inlay.base.errors import InlayError, NotFoundError
from inlay.messages.request import GrammarKind, Task
from inlay.transport import frames
from tests.fuzz.guided import instrumented, run
from tests.fuzz.json_mutation import JsonMutation
from tests.fuzz.mutation import mutated

TARGETS = ("completions", "chat", "responses", "messages")
CORPUS = Path(__file__).parent / "corpus" / "requests"
HIDDEN = 8
LENGTHS = {"RUN": 64, "_SAMPLE": 16, "STEP": 300, "_KEPT": 200}
"""Of strings that are lifted, and of what is looked at in one go, lowered so that small bodies reach them."""
_PIECES = (3, 17, 29, 41, 47, 61, 64, 67, 90, 128, 150, 200, 250, 333, 4096, 4096)
"""Bytes of the pieces a body may come in, of which there are at most about eight."""
_MAY_BE_LIFTED = re.compile(rb'"[^"]{%d}' % LENGTHS["RUN"])

WORDS = (
    b'"', b'\\"', b"\\\\", b"\\", b"\\/", b"\\u0041", b"\\ud800", b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"-1", b"1e999", b"=",
    b"==", b"\xff", b"QUJD" * 16, b"A" * 64, b'"A"', b'{"type":"text","text":"a"}', b'{"type":"token_ids","token_ids":[1,2]}', b'{"ref":"pe-1"}',
    b'"prompt":', b'"prompt_embeds":', b'"messages":', b'"content":', b'"role":"tool"', b'"type":"prompt_embeds"', b'"data":', b'"ref":',
    b'"part":', b'"tools":', b'"tool_calls":', b'"arguments":', b'"function":', b'"reasoning_content":', b'"reasoning":', b'"thinking":', b'"refusal":', b'"audio":', b'"transcript":', b'"function_call":', b'"continue_final_message":true',
    b'"add_generation_prompt":false', b'"chat_template_kwargs":', b'"logit_bias":{"1":100}', b'"stop":["a"]', b'"n":128', b'"max_tokens":',
    b'"echo":true', b'"prompt_logprobs":', b'"truncate_prompt_tokens":-1', b'"truncation_side":"right"', b'"best_of":', b'"input":', b'"instructions":',
    b'"include":["message.output_text.logprobs"]', b'"structured_outputs":', b'"bad_words":', b'"json_schema":', b'"grammar":', b'"structural_tag":',
    b'"text":', b'"format":', b'"type":"function_call_output"', b'"call_id":', b'"logprobs":',
    b'"suffix":"a"', b'"response_format":', b'"stream_options":{}', b'"cache_salt":', b'"seed":-1',
    b'"temperature":', b'"top_p":', b'"min_tokens":', b'"stop_token_ids":[1]', b'"priority":', b"9223372036854775808", b"<|im_start|>",
)  # fmt: skip


class _Routes(NamedTuple):
    """The real things between a request's body and its requests, and what of them is turned while they are fuzzed."""

    answer: Callable[[str, bytes], "_Call"]
    stored: str
    decoders: dict[str, Any]
    turned: list[tuple[Any, str, Any]]
    lift: Any
    limits: Any
    error_json: Callable[[InlayError], bytes]


class _Call(Protocol):
    """A request whose requests are made, and that as the chat or the completion it was read as."""

    request: Any
    generation: Any


@cache
def _routes() -> _Routes:
    """Imported late, so that they can be instrumented."""
    from inlay.api.anthropic import route as messages
    from inlay.api.generation import sampling
    from inlay.api.openai.chat import route as chat
    from inlay.api.openai.completions import route as completions
    from inlay.api.openai.responses import route as responses
    from inlay.http import parsed_request
    from inlay.http.bodies import base64_extractor as lift
    from inlay.http.bodies.accounting import RequestMemory, Reservation
    from inlay.http.bodies.memory import Room, private
    from inlay.http.callers.auth import ANYONE
    from inlay.http.errors import error_json
    from inlay.http.server import Call, Server
    from inlay.http.settings import FrontendSettings
    from inlay.messages.card import Adapter, Limits, ModelCard
    from inlay.messages.digest import Secret
    from inlay.messages.prompt import Buffer
    from inlay.router import Router, ServedModel
    from inlay.store import PromptStore
    from inlay.store.prompts import Threads
    from inlay.tensors import read, write
    from tests.render.directories import qwen_like

    card = ModelCard(
        name="m",
        path=str(qwen_like()),
        weights_id="0" * 32,
        dtype="float32",
        vocab_size=400,
        hidden_size=HIDDEN,
        limits=Limits(
            max_model_len=512, max_num_seqs=8, max_logprobs=5, max_prompt_embeds_abs=100.0
        ),
        engine="echo",
        engine_version="0",
        embedding_table_id="a-table",
        grammars=get_args(GrammarKind),
    )

    class OneModel(Router):
        """The only thing that is not real: nothing is behind it."""

        def __init__(self) -> None:
            pass

        def models(self) -> list[ModelCard]:
            return [card]

        def card(self, name: str) -> ModelCard:
            if name != card.name:
                raise NotFoundError(f"The model `{name[:40]}` does not exist.", param="model")
            return card

        def model(self, name: str, task: Task | None = None) -> ServedModel:
            return ServedModel(self.card(name))

        choose = model

        def adapters(self, card: ModelCard) -> list[Adapter]:
            return []

        def ready(self) -> list[Any]:
            return []

        def workers(self, name: str, task: Task | None = None) -> list[Any]:
            return []

    class InOneThread(Server):
        """A server that waits for no thread, so that no event loop is needed."""

        async def run_prepared(
            self, size: int, function: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> Any:
            return function(*args, **kwargs)

    @dataclass(slots=True)
    class Kept(Call):
        """A call that has its body, and keeps what would be generated."""

        content: bytes = b""
        request: Any = None
        generation: Any = None

    async def read_kept(call: Kept, room: Room = private) -> lift.ExtractedBody:
        call.memory = RequestMemory(call.reservation, server.limits)
        arrived: lift.ExtractedBody = _arrived(lift, call.content, room)
        return arrived

    async def keep(
        call: Kept, request: Any, card: object, generation: Any, *rest: object, **named: object
    ) -> None:
        call.request, call.generation = request, generation

    modules = {"completions": completions, "chat": chat, "responses": responses}
    modules["messages"] = messages
    # Small bodies are lifted too; where requests are sent to a worker, this ends; and seeds that
    # are drawn would differ.
    turned: list[tuple[Any, str, Any]] = [
        *((lift, name, value) for name, value in LENGTHS.items()),
        *((module, "respond", keep) for module in modules.values()),
    ]
    turned.append((sampling, "secrets", SimpleNamespace(randbits=lambda _: 7)))
    turned.append((Threads, "run", _at_once))
    turned.append((parsed_request, "read_body", read_kept))
    settings = FrontendSettings(
        enable_prompt_embeds=True,
        max_prompt_embeds_bytes=2000,
        max_choices=4,
        scheduling_policy="priority",
    )
    store = PromptStore(Secret(bytes(32)), memory_bytes=1 << 20, ttl=1.0, clock=lambda: 0.0)
    server = InOneThread(OneModel(), settings, Secret(bytes(32)), store)
    data = write(_rows(), "npy")
    stored = store.put(ANYONE.tenant.id, Buffer(data), read(data)).id
    asyncio.run(server.renderers.of(card))
    routes = {
        "completions": completions.completions,
        "chat": chat.chat_completions,
        "responses": responses.responses,
        "messages": messages.messages,
    }

    def answer(target: str, body: bytes) -> Kept:
        reservation = Reservation(server.budget)
        reservation.grow_to(len(body))
        with reservation:
            call = Kept(server, {"headers": []}, _never, _never, "r", reservation, content=body)
            try:
                routes[target](call).send(None)
            except StopIteration:
                return call
        raise AssertionError("a request of which all is there waits for something")

    decoders = {name: module._decoder for name, module in modules.items()}
    return _Routes(answer, stored, decoders, turned, lift, card.limits, error_json)


def _rows() -> Any:
    return np.arange(2 * HIDDEN, dtype=np.float32).reshape(2, HIDDEN) / 8


def _arrived(lift: Any, body: bytes, room: Any) -> Any:
    # Which pieces it comes in is told by the body itself, so that an input says all.
    how = crc32(body)
    step, first = max(_PIECES[how & 15], len(body) >> 3), how >> 4 & 7
    # Where nothing is lifted all pieces are alike.
    if len(body) < lift.RUN:
        step = 4096
    told = [0]
    cutting = lift.Base64Extractor(len(body) if how & 128 else None, room, told.append)
    cutting.feed(body[:first])
    for start in range(first, len(body), step):
        cutting.feed(body[start : start + step])
    lifted = cutting.close()
    assert bytes(lifted.reassembled()) == body
    assert max(told) <= len(body) - sum(
        len(part) for run in lifted.runs if run.whole for part in run.encoded()
    )
    return lifted


async def _at_once(_: object, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return work(*args, **kwargs)


async def _never(*_: object) -> Any:
    raise AssertionError("a body that is there already is read, or an answer sent")


@contextmanager
def _turned(attributes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    before = [getattr(owner, name) for owner, name, _ in attributes]
    try:
        for owner, name, value in attributes:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(attributes, before, strict=True):
            setattr(owner, name, value)


def outcome(target: str, body: bytes) -> tuple[str, Any]:
    """What becomes of `body`.

    "requests" and those for an engine as bytes, or an error's name and what its client sees.
    """
    routes = _routes()
    try:
        call = routes.answer(target, body)
    except InlayError as error:
        if not 400 <= error.status < 500:
            raise
        return type(error).__name__, routes.error_json(error)
    most = routes.limits.max_model_len
    least = 0 if getattr(call.request, "only_reads", False) else 1
    requests = []
    for request in call.generation.requests:
        length = len(request.prompt)
        assert length > 0
        assert least <= request.sampling.max_tokens <= most - length
        header, buffers = frames.encode(msgspec.structs.replace(request, id="w"))
        requests.append((header, [bytes(buffer.view) for buffer in buffers]))
    assert requests
    return "requests", requests


def check(target: str, body: bytes) -> bool:
    """Take `body` in both ways; and it must be possible to put it together again.

    Returns:
        Whether it was accepted.

    Raises:
        AssertionError: the two ways differ, or something no engine should see came out.
        Exception: anything but an `InlayError` came out.
    """
    routes = _routes()
    with _turned(routes.turned):
        lifted = outcome(target, body)
        # Where there is nothing to lift, there is only the other way.
        if _MAY_BE_LIFTED.search(body):
            routes.lift.RUN = 1 << 60
            full = outcome(target, body)
            assert lifted == full, (lifted, full)
    return lifted[0] == "requests"


def bodies(target: str) -> dict[str, bytes]:
    """Valid requests of many shapes, and some that are refused: where mutation starts."""
    from inlay.tensors import write

    rows = _rows()
    stored = _routes().stored
    kinds: tuple[Literal["safetensors", "torch", "npy"], ...] = ("safetensors", "torch", "npy")
    files = {kind: base64.b64encode(write(rows, kind)).decode() for kind in kinds}
    stamped = base64.b64encode(write(rows, "safetensors", table_id="a-table")).decode()
    batch = base64.b64encode(write(rows[None].repeat(2, 0), "safetensors")).decode()
    bad = base64.b64encode(write(rows * np.float32("nan"), "safetensors")).decode()
    part = {"type": "prompt_embeds", "data": files["safetensors"]}
    text = {"type": "text", "text": "the harbour <|im_end|>"}
    rest: dict[str, Any] = {
        "max_tokens": 4,
        "n": 2,
        "seed": 3,
        "logit_bias": {"5": 1.5},
        "stop": ["a", "b"],
    }
    if target == "completions":
        found: dict[str, Any] = {
            "text": {"prompt": "count the lanterns", **rest},
            "texts": {"prompt": ["count", "the"], "echo": True},
            "ids": {"prompt": [1, 2, 3], "stop_token_ids": [4], "logprobs": 2, "cache_salt": "s"},
            "lists-of-ids": {"prompt": [[1, 2], [3]], "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1},
            "parts": {"prompt": [text, part, {"type": "token_ids", "token_ids": [5]}]},
            "lists-of-parts": {"prompt": [[text], [part]]},
            "batch": {"prompt": "", "prompt_embeds": batch},
            "stamped": {"prompt": None, "prompt_embeds": [stamped, files["npy"]], "repetition_penalty": 1.2},
            "ref": {"prompt_embeds": {"ref": "pe-1"}},
            "stored": {"prompt_embeds": [{"ref": stored}, files["npy"]], "priority": 1},
            "part": {"prompt_embeds": [{"part": "a"}, files["npy"]]},
            "not-finite": {"prompt_embeds": bad},
            "echo": {"prompt_embeds": files["npy"], "echo": True},
            "nested": {"prompt": "a", "response_format": {"type": [[["text"]]]}},
            "bound": {"prompt": "a", "structured_outputs": {"choice": ["a", "b"]}, "bad_words": ["the"], "allowed_token_ids": [1, 2]},
            "matched": {"prompt": "a", "structured_outputs": {"regex": "[a-z]+", "json": None}},
            "echoed": {"prompt": "count", "echo": True, "max_tokens": 0, "prompt_logprobs": 1, "logprobs": 1},
            "cut": {"prompt": [1, 2, 3, 4], "truncate_prompt_tokens": 2, "truncation_side": "left", "best_of": 1},
            **{str(kind): {"prompt_embeds": file, "max_tokens": 1} for kind, file in files.items()},
        }  # fmt: skip
    elif target == "responses":
        called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
        told = {"type": "function_call_output", "call_id": "c", "output": [part]}
        function = {
            "type": "function",
            "name": "f",
            "parameters": {"type": "object"},
            "strict": True,
        }
        user = {"role": "user", "content": [{"type": "input_text", "text": "the harbour"}, part]}
        found = {
            "text": {"input": "count", "instructions": "be brief", "max_output_tokens": 4, "metadata": {"a": "b"}},
            "parts": {"input": [user], "include": ["message.output_text.logprobs"], "top_logprobs": 2, "seed": 3},
            "turns": {
                "input": [
                    {"role": "developer", "content": "a"}, {"role": "system", "content": [{"type": "input_text", "text": "b"}]}, user,
                    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}], "content": [{"type": "reasoning_text", "text": "r"}]},
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}, called, called, told,
                    {**told, "output": "y"},
                ],
                "tools": [function], "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False,
            },
            "continued": {"input": [user, {"role": "assistant", "content": "and so ", "status": "incomplete"}]},
            "formatted": {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "medium"}},
            "effort": {"input": "a", "reasoning": {"effort": "low", "summary": "auto"}, "tools": [function], "tool_choice": "auto"},
            "stored": {"input": [{"role": "user", "content": [{"type": "prompt_embeds", "ref": stored}]}], "store": False},
            "state": {"input": "a", "previous_response_id": "resp_1"},
            "image": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        }  # fmt: skip
    elif target == "messages":
        user = {"role": "user", "content": [text, part, text]}
        use: dict[str, Any] = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "<rows>"}}
        result: dict[str, Any] = {
            "type": "tool_result",
            "tool_use_id": "c",
            "content": [text, part],
            "is_error": True,
        }
        custom = {"name": "f", "input_schema": {"type": "object"}, "strict": True}
        image = {"type": "base64", "media_type": "image/png", "data": files["npy"]}
        found = {
            "text": {"messages": [{"role": "user", "content": "b"}], "system": "a", "stop_sequences": ["a", "b"]},
            "parts": {"messages": [user], "system": [text, part], "temperature": 0.5, "top_k": 3},
            "turns": {
                "messages": [
                    user,
                    {"role": "assistant", "content": [
                        {"type": "thinking", "thinking": "r", "signature": ""}, {"type": "redacted_thinking", "data": "x"}, text, use]},
                    {"role": "user", "content": [result, {**result, "content": "y"}, text]},
                ],
                "tools": [custom], "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            },
            "continued": {"messages": [user, {"role": "assistant", "content": "and so "}]},
            "thinking": {"messages": [user], "thinking": {"type": "enabled", "budget_tokens": 3, "display": "omitted"}},
            "formatted": {"messages": [user], "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"}},
            "stored": {"messages": [{"role": "user", "content": [{"type": "prompt_embeds", "ref": stored}]}]},
            "image": {"messages": [{"role": "user", "content": [{"type": "image", "source": image}]}]},
        }  # fmt: skip
        found = {name: {"max_tokens": 4, **body} for name, body in found.items()}
    else:
        user = {"role": "user", "content": [text, part, text]}
        call = {
            "id": "c",
            "type": "function",
            "function": {"name": "f", "arguments": '{"a": "<rows>"}'},
        }
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        found = {
            "text": {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], **rest},
            "parts": {"messages": [user], "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2},
            "neighbours": {"messages": [{"role": "user", "content": [part, part]}, {"role": "assistant", "content": None}]},
            "tools": {
                "messages": [user, {"role": "assistant", "content": "x", "tool_calls": [call]}, {"role": "tool", "content": "y"}],
                "tools": [tool], "tool_choice": "auto",
            },
            "continued": {
                "messages": [user, {"role": "assistant", "content": "and so ", "reasoning_content": "r"}],
                "continue_final_message": True, "add_generation_prompt": False,
            },
            "variables": {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"enable_thinking": False}},
            "image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "stored": {"messages": [{"role": "user", "content": [text, {"type": "prompt_embeds", "ref": stored}]}]},
            "chosen": {"messages": [{"role": "user", "content": "a"}], "tools": [tool, tool], "tool_choice": "required", "parallel_tool_calls": False},
            "named": {"messages": [user], "tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "formatted": {
                "messages": [{"role": "user", "content": "a"}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}},
            },
            "unwritten": {"messages": [{"role": "nobody", "content": "a"}], "add_generation_prompt": False},
            "ref": {"messages": [{"role": "user", "content": [{"type": "prompt_embeds", "ref": "pe-1"}]}]},
            "batch": {"messages": [{"role": "user", "content": [{"type": "prompt_embeds", "data": batch}]}]},
        }  # fmt: skip
    return {name: json.dumps(body, separators=(",", ":")).encode() for name, body in found.items()}


def corpus(target: str) -> list[bytes]:
    """The bodies in the repository."""
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


def json_mutation(target: str) -> JsonMutation:
    """Of the target's bodies, with the names of all its fields."""
    return JsonMutation(bodies(target).values(), _routes().decoders[target].type.__struct_fields__)


def fuzz(target: str, executions: int, seed: int) -> int:
    """Check `executions` mutations of the corpus; how many were accepted."""
    rng = random.Random(seed)
    inputs = corpus(target)
    restructured = json_mutation(target)
    accepted = 0
    for number in range(executions):
        body = rng.choice(inputs)
        body = restructured(body, rng) if number % 2 else mutated(body, inputs, WORDS, rng)
        try:
            accepted += check(target, body)
        except BaseException:
            Path("crash.json").write_bytes(body)
            raise
    return accepted


def _guided(target: str, options: Sequence[str]) -> None:
    # The readers of files have targets of their own.
    with instrumented("inlay.http", "inlay.api", "inlay.render"):
        _routes()
    inputs = corpus(target)
    run(
        lambda body: check(target, body),
        [lambda body, rng: mutated(body, inputs, WORDS, rng), *[json_mutation(target)] * 2],
        options,
        [CORPUS / target],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the module's docstring says."""
    parser = argparse.ArgumentParser(description="Fuzz what takes requests in.")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--make-corpus", action="store_true")
    parser.add_argument("--atheris", nargs=argparse.REMAINDER, help="libFuzzer's arguments")
    options = parser.parse_args(arguments)
    if options.make_corpus:
        folder = CORPUS / options.target
        folder.mkdir(parents=True, exist_ok=True)
        for name, body in bodies(options.target).items():
            (folder / name).write_bytes(body)
    elif options.atheris is not None:
        _guided(options.target, options.atheris)
    else:
        accepted = fuzz(options.target, options.executions, options.seed)
        print(f"{options.executions} executions, {accepted} accepted")


if __name__ == "__main__":
    main()
