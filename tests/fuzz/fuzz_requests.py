"""Fuzz what takes requests in: a body is refused with an `InlayError`, or becomes prompts and samplings an engine may be given.

    python -m tests.fuzz.fuzz_requests completions --executions 1000000 [--seed 1]
    python -m tests.fuzz.fuzz_requests chat --atheris FOLDER -runs=10000000 -max_len=4096

Every body goes in twice, once with its base64 lifted out and once through the full parser alone: both must end alike.
The first form needs nothing but mutates blindly; the second is guided by coverage, needs `atheris` and takes libFuzzer's
options; FOLDER receives what reaches something new. `--make-corpus` writes the bodies mutation starts from.
"""

import argparse
import base64
import json
import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from tests.fuzz.guided import instrumented, run
from tests.fuzz.json_mutation import JsonMutation
from tests.fuzz.mutation import mutated

TARGETS = ("completions", "chat")
CORPUS = Path(__file__).parent / "corpus" / "requests"
HIDDEN = 8
RUN, SAMPLE = 64, 16
"""The lengths from which strings are lifted and looked at, lowered so that small bodies reach it."""
_MAY_BE_LIFTED = re.compile(rb'"[^"]{%d}' % RUN)

WORDS = (
    b'"', b'\\"', b"\\\\", b"\\", b"\\/", b"\\u0041", b"\\ud800", b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"-1", b"1e999", b"=",
    b"==", b"\xff", b"QUJD" * 16, b"A" * 64, b'"A"', b'{"type":"text","text":"a"}', b'{"type":"token_ids","token_ids":[1,2]}', b'{"ref":"pe-1"}',
    b'"prompt":', b'"prompt_embeds":', b'"messages":', b'"content":', b'"role":"tool"', b'"type":"prompt_embeds"', b'"data":', b'"ref":',
    b'"part":', b'"tools":', b'"tool_calls":', b'"arguments":', b'"function":', b'"reasoning_content":', b'"continue_final_message":true',
    b'"add_generation_prompt":false', b'"chat_template_kwargs":', b'"logit_bias":{"1":100}', b'"stop":["a"]', b'"n":128', b'"max_tokens":',
    b'"echo":true', b'"prompt_logprobs":', b'"truncate_prompt_tokens":-1', b'"truncation_side":"right"', b'"best_of":', b'"logprobs":', b'"suffix":"a"', b'"response_format":', b'"stream_options":{}', b'"cache_salt":', b'"seed":-1',
    b'"temperature":', b'"top_p":', b'"min_tokens":', b'"stop_token_ids":[1]', b'"priority":', b"9223372036854775808", b"<|im_start|>",
)  # fmt: skip


@cache
def _parts() -> Any:
    """The real things a request meets before an engine does: imported late, so that they can be instrumented."""
    import msgspec

    from inlay.digest import Secret
    from inlay.frontend import chat, completions, lift
    from inlay.frontend.embeds import Embeddings, EmbedsReader
    from inlay.frontend.errors import error_json
    from inlay.frontend.limits import EmbedsLimits
    from inlay.frontend.messages import with_rows
    from inlay.frontend.metrics import Metrics
    from inlay.frontend.prompts import PromptReader
    from inlay.frontend.sampling import check_request, for_choice, sampling_of
    from inlay.frontend.settings import FrontendSettings
    from inlay.protocol import frames
    from inlay.protocol.openai.chat import ChatRequest
    from inlay.protocol.openai.completions import CompletionRequest
    from inlay.protocol.work import Limits, ModelCard, Work
    from inlay.render import Renderer
    from tests.render.directories import qwen_like

    settings = FrontendSettings(enable_prompt_embeds=True, max_prompt_embeds_bytes=2000)
    embeds = EmbedsReader(
        True, EmbedsLimits(settings, lambda: ()), Secret(bytes(32)), Metrics(lambda: 0, lambda: 0)
    )
    card = ModelCard(
        name="m",
        path=str(qwen_like()),
        weights_id="0" * 32,
        dtype="float32",
        vocab_size=400,
        hidden_size=HIDDEN,
        limits=Limits(max_model_len=256, max_num_seqs=8, max_logprobs=5, max_prompt_embeds_abs=100.0),
        engine="echo",
        engine_version="0",
        embedding_table_id="a-table",
    )
    return SimpleNamespace(
        settings=settings,
        embeds=embeds,
        card=card,
        renderer=Renderer.load(card.path),
        Embeddings=Embeddings,
        decoders={
            "completions": msgspec.json.Decoder(CompletionRequest),
            "chat": msgspec.json.Decoder(ChatRequest),
        },
        chat=chat,
        completions=completions,
        error_json=error_json,
        check_request=check_request,
        for_choice=for_choice,
        frames=frames,
        lift=lift,
        PromptReader=PromptReader,
        sampling_of=sampling_of,
        Work=Work,
        with_rows=with_rows,
    )


def _embeddings(parts: Any, parsed: Any) -> Any:
    limits = parts.embeds.limits
    return parts.Embeddings(
        parts.embeds, parts.card, lambda text: parsed.data(text, limits=limits), hold=lambda _: None
    )


def _completions(parts: Any, body: bytes) -> tuple[Any, list[Any], Any]:
    parsed = parts.lift.parse(
        body, parts.decoders["completions"], parts.embeds.in_completion, limits=parts.embeds.limits
    )
    request = parsed.request
    parts.check_request(request)
    reader = parts.PromptReader(request, parts.card, parts.renderer, _embeddings(parts, parsed))
    limit = parts.card.limits.max_model_len
    prompts = parts.completions._prompts(reader, request, limit, parts.settings.max_choices)
    return request, prompts, parts.completions._sampling(request, parts.card, prompts)


def _chat(parts: Any, body: bytes) -> tuple[Any, list[Any], Any]:
    parsed = parts.lift.parse(
        body,
        parts.decoders["chat"],
        lambda request: parts.embeds.in_messages(request.messages),
        limits=parts.embeds.limits,
    )
    request = parsed.request
    parts.check_request(request)
    parts.chat._check_chat(request, parts.settings.max_choices)
    prompt = parts.chat._prompt(
        request,
        lambda read: parts.with_rows(request.messages, read),
        _embeddings(parts, parsed),
        parts.renderer,
    )
    max_tokens = (
        request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    )
    sampling = parts.sampling_of(
        request,
        parts.card,
        longest=len(prompt),
        max_tokens=max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        logprobs_param="top_logprobs",
    )
    return request, [prompt], sampling


def outcome(target: str, body: bytes) -> tuple[str, Any]:
    """What becomes of `body`: "works" and those for an engine as bytes, or an error's name and what its client sees."""
    from inlay.errors import InlayError

    parts = _parts()
    try:
        request, prompts, sampling = (_completions if target == "completions" else _chat)(parts, body)
        works = []
        for index, prompt in enumerate(prompts):
            assert 0 < len(prompt) <= parts.card.limits.max_model_len - (not request.only_echoes)
            own = parts.for_choice(
                sampling, seed=request.seed or 0, index=index, max_tokens=sampling.max_tokens
            )
            assert (not request.only_echoes) <= own.max_tokens < parts.card.limits.max_model_len
            work = parts.Work(id="w", prompt=prompt, sampling=own, salt=request.cache_salt)
            header, buffers = parts.frames.encode(work)
            works.append((header, [bytes(buffer.view) for buffer in buffers]))
    except InlayError as error:
        if not 400 <= error.status < 500:
            raise
        return type(error).__name__, parts.error_json(error)
    return ("works", works)


def check(target: str, body: bytes) -> bool:
    """Take `body` in both ways.

    Returns:
        Whether it was accepted.

    Raises:
        AssertionError: the two ways differ, or something no engine should see came out.
        Exception: anything but an `InlayError` came out.
    """
    lift = _parts().lift
    length, sample = lift.RUN, lift._SAMPLE
    try:
        lift.RUN, lift._SAMPLE = RUN, SAMPLE
        lifted = outcome(target, body)
        # Where there is nothing to lift, there is only the other way.
        if _MAY_BE_LIFTED.search(body):
            lift.RUN = 1 << 60
            full = outcome(target, body)
            assert lifted == full, (lifted, full)
    finally:
        lift.RUN, lift._SAMPLE = length, sample
    return lifted[0] == "works"


def bodies(target: str) -> dict[str, bytes]:
    """Valid requests of many shapes, and some that are refused: where mutation starts."""
    import numpy as np

    from inlay.tensors import write

    rows = np.arange(2 * HIDDEN, dtype=np.float32).reshape(2, HIDDEN) / 8
    kinds: tuple[Literal["safetensors", "torch", "npy"], ...] = ("safetensors", "torch", "npy")
    files = {kind: base64.b64encode(write(rows, kind)).decode() for kind in kinds}
    stamped = base64.b64encode(write(rows, "safetensors", table_id="a-table")).decode()
    batch = base64.b64encode(write(rows[None].repeat(2, 0), "safetensors")).decode()
    bad = base64.b64encode(write(rows * np.float32("nan"), "safetensors")).decode()
    part = {"type": "prompt_embeds", "data": files["safetensors"]}
    text = {"type": "text", "text": "the harbour <|im_end|>"}
    rest: dict[str, Any] = {"max_tokens": 4, "n": 2, "seed": 3, "logit_bias": {"5": 1.5}, "stop": ["a", "b"]}
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
            "part": {"prompt_embeds": [{"part": "a"}, files["npy"]]},
            "not-finite": {"prompt_embeds": bad},
            "echo": {"prompt_embeds": files["npy"], "echo": True},
            "nested": {"prompt": "a", "response_format": {"type": [[["text"]]]}},
            **{str(kind): {"prompt_embeds": file, "max_tokens": 1} for kind, file in files.items()},
        }  # fmt: skip
    else:
        user = {"role": "user", "content": [text, part, text]}
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "<rows>"}'}}
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
    return JsonMutation(bodies(target).values(), _parts().decoders[target].type.__struct_fields__)


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
    with instrumented("inlay.frontend", "inlay.render", "inlay.protocol"):
        _parts()
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
