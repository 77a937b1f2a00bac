"""Truncation of prompts, and lists of mixed prompts."""

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor

from inlay.api.generation.truncation import Truncation, kept_positions, truncated
from inlay.api.openai.completions.route import PromptReader
from inlay.api.openai.schema.completions import (
    CompletionRequest,
    PromptPart,
    TextPart,
    TokenIdsPart,
)
from inlay.base.errors import InvalidRequestError
from inlay.http.bodies import embeds as embeds_module
from inlay.http.bodies.accounting import EmbedsLimits
from inlay.http.bodies.embeds import Embeddings, EmbedsReader
from inlay.http.metrics.requests import Metrics
from inlay.http.settings import FrontendSettings
from inlay.messages.digest import Secret, row_digests
from inlay.messages.prompt import Buffer, Prompt, Rows, Segment, Tokens
from inlay.render import Renderer, ends
from inlay.router import ServedModel
from inlay.transport.local.arena import Arena
from tests.equality.reference import rows_of, tokenizer_of
from tests.live import Fleet
from tests.payloads import TEXT, embeds_of, error, post, saved
from tests.router.standing import CARD

LIMIT = 40


def rows(count: int, *, atomic: bool) -> Rows:
    return Rows(Buffer(bytes(range(count))), "float8_e4m3fn", (count, 1), atomic=atomic)


def positions(prompt: Prompt) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for segment in prompt.segments:
        if isinstance(segment, Tokens):
            found += [("token", id_) for id_ in segment.ids]
        elif isinstance(segment, Rows):
            found += [
                ("atomic" if segment.atomic else "row", value) for value in bytes(segment.data.view)
            ]
    return found


SEGMENTS = st.lists(
    st.lists(st.integers(0, 99), min_size=1, max_size=9).map(Tokens)
    | st.builds(rows, st.integers(1, 9), atomic=st.booleans()),
    min_size=1,
    max_size=5,
)


@given(
    segments=SEGMENTS,
    keep=st.integers(-1, LIMIT).filter(bool),
    side=st.sampled_from([None, "left", "right"]),
)
def test_what_is_kept_is_one_end_and_no_atomic_segment_is_split(
    segments: list[Segment], keep: int, side: Any
) -> None:
    prompt = Prompt.of(*segments)
    whole = positions(prompt)
    most = LIMIT - 3 if keep < 0 else keep
    try:
        kept = positions(Truncation.of(keep, side or "left", LIMIT, 3).cut(prompt))
    except InvalidRequestError:
        kept = []
    assert kept == (whole[: len(kept)] if side == "right" else whole[len(whole) - len(kept) :])
    assert len(kept) <= most
    bounds = prompt.atomic_bounds()
    cut = len(kept) if side == "right" else len(whole) - len(kept)
    assert not any(start < cut < stop for start, stop in bounds)
    if len(kept) < min(most, len(whole)):
        # Less than asked for only where a segment stands in the way.
        cut = most if side == "right" else len(whole) - most
        assert any(start < cut < stop for start, stop in bounds)


def test_an_output_of_unknown_length_is_left_room_for_one_token() -> None:
    assert kept_positions(-1, LIMIT, None) == LIMIT - 1
    assert kept_positions(-1, LIMIT, 0) == LIMIT
    assert kept_positions(-1, LIMIT, LIMIT + 5) == 1
    assert truncated(Prompt.of(Tokens(range(99))), 1, "left") == Prompt.of(Tokens([98]))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("between", [False, True])
def test_parts_beyond_one_that_was_cut_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: Any, between: bool
) -> None:
    monkeypatch.setattr(ends, "_ALWAYS", 2048)
    long = "=" * 16
    merges = [("=" * n, "=" * n) for n in (1, 2, 4, 8)]
    vocab = {
        token: n for n, token in enumerate(["a", "b", "=", *("=" * 2 * n for n in (1, 2, 4, 8))])
    }
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("={1,16}|."), "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    renderer = Renderer.load(tmp_path)
    # So long are its tokens that fewer are found than are kept.
    text = "b" * 100 + long * 290 if side == "left" else long * 290 + "b" * 100
    parts: list[PromptPart] = [TextPart(text="ab" * 10), TextPart(text=text)]
    if between:
        parts.insert(1, TokenIdsPart(token_ids=[0] * 7))
    if side == "right":
        parts.reverse()
    model = msgspec.structs.replace(CARD, path=str(tmp_path))
    settings = FrontendSettings()
    reader = EmbedsReader(
        False,
        EmbedsLimits(settings, lambda: [model]),
        Secret(bytes(32)),
        Metrics(lambda: 0, lambda: 0),
    )
    request = CompletionRequest(
        model="m", prompt=[*parts], truncation_side=side, truncate_prompt_tokens=300
    )
    embeddings = Embeddings(reader, model, lambda _: Buffer(b""), hold=lambda _: None)
    (prompt,) = PromptReader(request, (), ServedModel(model), renderer).prompts(embeddings, most=1)
    found = [id_ for kind, id_ in positions(prompt) if kind == "token"]
    whole = renderer.encode(text)
    assert 200 < len(found) < 300
    assert found == list(whole[-len(found) :] if side == "left" else whole[: len(found)])


BODY: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 5,
    "temperature": 0,
    "return_token_ids": True,
    "ignore_eos": True,
}


def ids_of(response: httpx.Response) -> list[list[int]]:
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


def test_a_truncated_prompt_answers_as_what_is_left_of_it(url: str, llama: Fleet) -> None:
    tokens = tokenizer_of(llama.path)(TEXT)["input_ids"]
    data = saved(embeds_of(llama))
    for side, left in (("left", tokens[-4:]), ("right", tokens[:4])):
        expected = ids_of(post(url, "/v1/completions", {**BODY, "prompt": left}))
        for form in ({"prompt": TEXT}, {"prompt": tokens}, {"prompt_embeds": data}):
            fields = {"truncate_prompt_tokens": 4, "truncation_side": side}
            response = post(url, "/v1/completions", {**BODY, **form, **fields})
            assert ids_of(response) == expected
            assert response.json()["usage"]["prompt_tokens"] == 4
    long = post(url, "/v1/completions", {**BODY, "prompt": [5] * 600, "truncate_prompt_tokens": -1})
    assert long.json()["usage"]["prompt_tokens"] == 512 - 5


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_far_beyond_the_context_is_cut_to_its_end(url: str, llama: Fleet, side: str) -> None:
    long = f"{TEXT} " * 20_000
    short = long[-9_000:] if side == "left" else long[:9_000]
    fields = {"truncate_prompt_tokens": 50, "truncation_side": side}
    answers = []
    for text in (long, short):
        data = saved(embeds_of(llama))
        # A chat's template says something at both ends.
        around = {"type": "prompt_embeds", "data": data}
        content = [around, {"type": "text", "text": text}, around]
        parts = [
            {"type": "text", "text": text},
            {"type": "prompt_embeds", "data": data},
            {"type": "text", "text": text},
        ]
        chat = {**BODY, **fields, "messages": [{"role": "user", "content": content}]}
        found = [
            *ids_of(post(url, "/v1/completions", {**BODY, **fields, "prompt": text})),
            *ids_of(post(url, "/v1/completions", {**BODY, **fields, "prompt": parts})),
            *ids_of(post(url, "/v1/chat/completions", chat)),
        ]
        answers.append(found)
    assert answers[0] == answers[1]
    refused = post(url, "/v1/completions", {**BODY, "prompt": long})
    assert "maximum context length" in error(refused)["message"]


def mixed(llama: Fleet) -> list[list[dict[str, Any]]]:
    """Three prompts of the same positions: ids, rows and ids, ids and rows."""
    tokens = tokenizer_of(llama.path)(TEXT)["input_ids"]
    table = rows_of(llama.path, tokens)

    def ids(part: list[int]) -> dict[str, Any]:
        return {"type": "token_ids", "token_ids": part}

    def embeds(part: Tensor) -> dict[str, Any]:
        return {"type": "prompt_embeds", "data": saved(part)}

    return [
        [ids(tokens)],
        [embeds(table[:3]), ids(tokens[3:])],
        [ids(tokens[:2]), embeds(table[2:])],
    ]


def test_lists_of_mixed_prompts_work_with_n_logprobs_and_streams(url: str, llama: Fleet) -> None:
    prompts = mixed(llama)
    (expected,) = ids_of(post(url, "/v1/completions", {**BODY, "prompt": TEXT}))
    body = {**BODY, "prompt": prompts, "n": 2, "logprobs": 1}
    whole = post(url, "/v1/completions", body)
    assert ids_of(whole) == [expected] * 6
    assert [choice["index"] for choice in whole.json()["choices"]] == list(range(6))
    assert all(len(choice["logprobs"]["token_logprobs"]) == 5 for choice in whole.json()["choices"])
    length = len(tokenizer_of(llama.path)(TEXT)["input_ids"])
    assert whole.json()["usage"]["prompt_tokens"] == 3 * length
    assert whole.json()["usage"]["completion_tokens"] == 30
    streamed: dict[int, list[int]] = {}
    lines = post(url, "/v1/completions", {**body, "stream": True}).text.splitlines()
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert streamed == dict.fromkeys(range(6), expected)


def test_ids_parts_and_texts_as_parts_may_be_prompts_of_one_request(url: str, llama: Fleet) -> None:
    tokens = tokenizer_of(llama.path)(TEXT)["input_ids"]
    text = {"type": "text", "text": TEXT}
    (expected,) = ids_of(post(url, "/v1/completions", {**BODY, "prompt": TEXT}))
    together = [[text], tokens, *mixed(llama)]
    assert ids_of(post(url, "/v1/completions", {**BODY, "prompt": together})) == [expected] * 5


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (["text", [5, 6]], "begins with a string and has a list too"),
        ([[5, 6], "text"], "begins with a list and has a string too"),
        ([5, "text"], "begins with a token id and has a string too"),
        ([[5], {"type": "text", "text": "a"}], "begins with a list and has a part too"),
        ([5, {"type": "text", "text": "a"}], "prompt holds token ids and parts"),
    ],
)
def test_what_may_not_stand_side_by_side_is_told(url: str, prompt: Any, says: str) -> None:
    response = post(url, "/v1/completions", {**BODY, "prompt": prompt})
    assert response.status_code == 400
    assert says in error(response)["message"]
    assert error(response)["param"] == "prompt"


def test_lists_of_mixed_prompts_are_held_to_the_limits(url: str, llama: Fleet) -> None:
    prompts = mixed(llama)
    over = error(post(url, "/v1/completions", {**BODY, "prompt": prompts, "n": 43}))
    assert "129 choices; at most 128" in over["message"]
    too_long = [*prompts, [{"type": "token_ids", "token_ids": [5] * 510}]]
    assert (
        "maximum context length"
        in error(post(url, "/v1/completions", {**BODY, "prompt": too_long}))["message"]
    )
    wrong = [*prompts, [{"type": "token_ids", "token_ids": [384]}]]
    found = error(post(url, "/v1/completions", {**BODY, "prompt": wrong}))
    assert found["param"] == "prompt[3][0].token_ids"


def test_best_of_shows_the_likeliest_outputs(url: str) -> None:
    body = {**BODY, "prompt": TEXT, "temperature": 1.0, "seed": 7, "logprobs": 0, "n": 6}
    every = post(url, "/v1/completions", body).json()
    ranked = sorted(every["choices"], key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    del body["logprobs"]
    best = post(url, "/v1/completions", {**body, "n": 2, "best_of": 6}).json()
    assert [choice["token_ids"] for choice in best["choices"]] == [
        choice["token_ids"] for choice in ranked[:2]
    ]
    assert [(choice["index"], choice["logprobs"]) for choice in best["choices"]] == [
        (0, None),
        (1, None),
    ]
    assert best["usage"]["completion_tokens"] == 30


def test_choices_of_one_prompt_send_its_rows_once_and_hash_them_once(
    url: str, llama: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    placed: list[int] = []
    take = Arena._take

    def counted(found: Rows, secret: Secret) -> bytes:
        hashed.append(len(found))
        return row_digests(found, secret)

    def taken(arena: Arena, length: int) -> int | None:
        placed.append(length)
        return take(arena, length)

    monkeypatch.setattr(embeds_module, "row_digests", counted)
    monkeypatch.setattr(Arena, "_take", taken)
    table = embeds_of(llama)
    tall = table.repeat(400 // len(table) + 1, 1)[:400]  # 75 KB: enough to go through shared memory
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model="tiny", prompt="", n=4, max_tokens=3, extra_body={"prompt_embeds": saved(tall)}
        )
    assert len(answer.choices) == 4
    assert hashed == [400]
    assert len(placed) == 1


def test_ids_beyond_the_models_length_are_not_made_text(url: str) -> None:
    assert post(url, "/detokenize", {"tokens": [5] * 512}).status_code == 200
    found = error(post(url, "/detokenize", {"tokens": [5] * 513}))
    assert (found["param"], "at most 512" in found["message"]) == ("tokens", True)
