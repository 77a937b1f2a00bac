"""The cases of vLLM's own tests of its server, in our words.

Completions, chats, tokens, ids as tokens, embeddings as prompts.
"""

import base64
import io
from dataclasses import dataclass
from typing import Any

import torch

TEXT = "count the lanterns of the harbour"
IDS = [40, 41, 42, 43, 44]
THINK = 344
"""The tag that begins the reasoning of `serving.speaking_model`."""

SYSTEM = {"role": "system", "content": "you are a helpful assistant"}
USER = {"role": "user", "content": "what is 1+1?"}
TURNS = [
    SYSTEM,
    USER,
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "again"},
]

USAGES: tuple[dict[str, Any], ...] = (
    {"include_usage": False, "continuous_usage_stats": False},
    {"include_usage": False, "continuous_usage_stats": True},
    {"include_usage": True, "continuous_usage_stats": False},
    {"include_usage": True, "continuous_usage_stats": True},
    {},
)
"""Every way of asking a stream for its usage."""


@dataclass(frozen=True)
class Case:
    """One request. Its id is `NAME`, and `NAME stream` for a stream."""

    name: str
    path: str
    body: dict[str, Any]

    @property
    def id(self) -> str:
        return self.name + (" stream" if self.body.get("stream") else "")


def completion(name: str, *, greedy: bool = True, **fields: Any) -> Case:
    body = {
        "model": "m",
        "prompt": TEXT,
        "max_tokens": 5,
        **({"temperature": 0.0} if greedy else {}),
        **fields,
    }
    return Case(f"completion {name}", "/v1/completions", body)


def chat(name: str, **fields: Any) -> Case:
    body = {
        "model": "m",
        "messages": [SYSTEM, USER],
        "max_completion_tokens": 5,
        "temperature": 0.0,
    }
    return Case(f"chat {name}", "/v1/chat/completions", {**body, **fields})


def both(case: Case) -> list[Case]:
    """A case whole and as a stream."""
    return [case, Case(case.name, case.path, {**case.body, "stream": True})]


def completions() -> list[Case]:
    """Texts, ids, logprobs, choices, streams, ends, bounds, mistakes."""
    return [
        *both(completion("of a text")),
        *both(completion("of ids", prompt=IDS)),
        *both(completion("of several texts", prompt=[TEXT, "the town"])),
        *both(completion("of several lists of ids", prompt=[IDS, IDS[:2]])),
        *both(completion("of several choices", n=3)),
        completion("without a bound", max_tokens=None),
        *(
            completion(f"cut {side}", prompt=IDS, truncate_prompt_tokens=3, truncation_side=side, return_token_ids=True)
            for side in ("left", "right")
        ),
        *(completion(f"cut to {size}", truncate_prompt_tokens=size) for size in (-1, 0, 600)),
        *(case for count in (None, 0, 1, 5) for case in both(completion(f"logprobs {count}", logprobs=count))),
        *both(completion("logprobs 21", logprobs=21)),
        *(
            completion(f"prompt logprobs {count}", prompt=[TEXT, "the town"], prompt_logprobs=count)
            for count in (None, -1, 0, 1, -2, 21)
        ),
        *both(completion("prompt logprobs in a stream", prompt_logprobs=1))[1:],
        *(completion(f"usage {n}", stream=True, stream_options=options) for n, options in enumerate(USAGES)),
        *(completion(f"usage {n} without a stream", stream_options=USAGES[n]) for n in (0, 2)),
        *both(completion("echo", echo=True)),
        *both(completion("echo with logprobs", echo=True, logprobs=1)),
        *both(completion("echo alone", echo=True, logprobs=1, max_tokens=0)),
        *both(completion("stop", stop=["e", "o"], max_tokens=30)),
        *both(completion("stop shown", stop=["e"], include_stop_str_in_output=True, max_tokens=30)),
        completion("stop token", stop_token_ids=list(range(3, 200)), max_tokens=30),
        completion("least tokens", min_tokens=5, max_tokens=8),
        completion("bias", logit_bias={"40": 100}),
        completion("bias beyond the vocabulary", logit_bias={"100000": 1}),
        completion("allowed ids", allowed_token_ids=[40, 41]),
        completion("bad words", bad_words=["the"]),
        completion("penalties", presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.3),
        completion("special tokens shown", prompt=[1, 40, 2], skip_special_tokens=False, spaces_between_special_tokens=False),
        *both(completion("ids shown", return_token_ids=True)),
        *both(completion("tokens as ids", logprobs=2, return_tokens_as_token_ids=True)),
        *both(completion("named ids", logprobs=1, logprob_token_ids=[7, 40, 300])),
        completion("named ids without logprobs", logprob_token_ids=[7]),
        completion("named ids that are none", logprobs=1, logprob_token_ids=[100000]),
        completion("too many named ids", logprobs=1, logprob_token_ids=[7] * 129),
        *both(completion("thinking", prompt=[40, 41, 42, THINK], thinking_token_budget=3, max_tokens=12, return_token_ids=True)),
        completion("thinking in the prompt", prompt=[40, THINK, 42], thinking_token_budget=3, max_tokens=12, return_token_ids=True),
        completion("no thinking", prompt=[40, THINK], thinking_token_budget=0, max_tokens=6, return_token_ids=True),
        completion("thinking unbounded", prompt=[40, THINK], thinking_token_budget=-1, max_tokens=6, return_token_ids=True),
        completion("thinking of -2", thinking_token_budget=-2),
        completion("a name for the request", request_id="mine"),
        *(completion(f"held to a {kind}", structured_outputs={kind: value}, max_tokens=20)
          for kind, value in (("regex", "[a-c]{3}"), ("choice", ["harbour", "town"]))),
        completion("two grammars", structured_outputs={"regex": "a", "choice": ["a"]}),
        completion("a suffix", suffix="end"),
        completion("another model", model="nobody"),
        completion("a temperature below 0", temperature=-1.0),
        completion("a top_p of 0", top_p=0.0),
        completion("no choice", n=0),
        completion("an empty text", prompt=""),
        completion("no prompt", prompt=None),
        completion("no prompts", prompt=[]),
        completion("an id beyond the vocabulary", prompt=[5, 100000]),
        completion("too long a prompt", prompt=[5] * 600),
        completion("too long an output", prompt=[5] * 500, max_tokens=100),
        completion("no tokens", max_tokens=0),
        completion("a list as max_tokens", max_tokens=[1]),
        completion("an unknown field", min_characters=10),
    ]  # fmt: skip


def chats() -> list[Case]:
    """As completions, and templates, roles, formats."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return [
        *both(chat("alone")),
        *both(chat("of several turns", messages=TURNS)),
        *both(chat("of several choices", n=2)),
        chat("bound by the old name", max_completion_tokens=None, max_tokens=3),
        *(case for fields in ({"logprobs": False}, {"logprobs": True, "top_logprobs": 0}, {"logprobs": True},
                              {"logprobs": True, "top_logprobs": 5})
          for case in both(chat(f"logprobs {fields}", **fields))),
        *both(chat("top_logprobs 21", logprobs=True, top_logprobs=21)),
        chat("top_logprobs without logprobs", top_logprobs=2),
        *(chat(f"prompt logprobs {count}", messages=TURNS, prompt_logprobs=count) for count in (None, -1, 0, 1, 2)),
        *(chat(f"usage {n}", stream=True, stream_options=options) for n, options in enumerate(USAGES)),
        *(chat(f"usage {n} without a stream", stream_options=USAGES[n]) for n in (0, 2)),
        *both(chat("stop", stop="e", max_completion_tokens=30)),
        *both(chat("ids shown", return_token_ids=True)),
        *both(chat("tokens as ids", logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)),
        *both(chat("named ids", logprobs=True, logprob_token_ids=[7, 40, 300])),
        chat("named ids without logprobs", logprob_token_ids=[7]),
        chat("a last message to go on with", messages=[USER, {"role": "assistant", "content": "it is"}],
             continue_final_message=True, add_generation_prompt=False),
        chat("a last message closed and open", messages=[USER], continue_final_message=True, add_generation_prompt=True),
        chat("without the turn of the assistant", add_generation_prompt=False),
        chat("parts", messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
        chat("echo", messages=[USER, {"role": "assistant", "content": "it is"}], echo=True,
             continue_final_message=True, add_generation_prompt=False),
        *both(chat("held to a choice", structured_outputs={"choice": ["harbour", "town"]}, max_completion_tokens=20)),
        chat("held to a schema", response_format=format_, max_completion_tokens=40),
        chat("no schema", response_format={"type": "json_schema"}),
        chat("no messages", messages=[]),
        chat("no tools", tools=[]),
        chat("a tool that is none", tools=[{"type": "function", "function": {"name": "f"}}],
             tool_choice={"type": "function", "function": {"name": "g"}}),
        chat("a choice of no tools", tool_choice="auto"),
        chat("another model", model="nobody"),
        chat("bias that is no id", logit_bias={"a": 1}),
        chat("too long", messages=[{"role": "user", "content": "lantern " * 600}]),
    ]  # fmt: skip


def tokens() -> list[Case]:
    """Text and chats to ids and back."""
    return [
        Case("tokenize a text", "/tokenize", {"model": "m", "prompt": TEXT}),
        Case("tokenize bare", "/tokenize", {"model": "m", "prompt": TEXT, "add_special_tokens": False}),
        Case("tokenize and spell", "/tokenize", {"model": "m", "prompt": "naïve " + TEXT, "return_token_strs": True}),
        Case("tokenize nothing", "/tokenize", {"model": "m", "prompt": ""}),
        Case("tokenize a chat", "/tokenize", {"model": "m", "messages": TURNS, "return_token_strs": True}),
        Case("tokenize a chat left open", "/tokenize", {"model": "m", "messages": TURNS, "add_generation_prompt": False}),
        Case("tokenize for nobody", "/tokenize", {"model": "nobody", "prompt": TEXT}),
        Case("detokenize", "/detokenize", {"model": "m", "tokens": [1, *IDS, 2]}),
        Case("detokenize nothing", "/detokenize", {"model": "m", "tokens": []}),
        Case("detokenize what is no id", "/detokenize", {"model": "m", "tokens": [-1]}),
    ]  # fmt: skip


def embeds(rows: torch.Tensor, hidden: int) -> list[Case]:
    """Embeddings as prompts, in completions and chats; `rows` are those of a text, (n, hidden)."""
    one, other = encoded(rows), encoded(rows[:3])
    part = {"type": "prompt_embeds", "data": one}
    chats = {
        "before a text": [{"role": "user", "content": [part, {"type": "text", "text": "Continue:"}]}],
        "around a text": [{"role": "user", "content": [part, {"type": "text", "text": " and "}, {**part, "data": other}]}],
        "in several messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}, part]},
            {"role": "user", "content": [{**part, "data": other}, {"type": "text", "text": "Go on."}]},
        ],
        "alone": [{"role": "user", "content": [part]}],
    }  # fmt: skip
    bad = {
        "no data": {"type": "prompt_embeds"},
        "no base64": {**part, "data": "not_valid_base64!!"},
        "another width": {**part, "data": encoded(torch.zeros(40, hidden + 1))},
    }
    return [
        *both(completion("of rows", prompt=None, prompt_embeds=one)),
        *both(completion("of several rows", prompt=None, prompt_embeds=[one, other])),
        completion("of rows and an empty text", prompt="", prompt_embeds=one),
        *(completion(f"of rows with logprobs {n}", prompt=None, prompt_embeds=one, logprobs=n) for n in (0, 1)),
        completion("of rows with prompt logprobs", prompt=None, prompt_embeds=one, prompt_logprobs=1),
        completion("of rows with true prompt logprobs", prompt=None, prompt_embeds=one, prompt_logprobs=True),
        completion("of rows with ids shown", prompt=None, prompt_embeds=one, return_token_ids=True),
        completion("of no base64", prompt=None, prompt_embeds="invalid_base64"),
        completion("of rows of another width", prompt=None, prompt_embeds=encoded(torch.zeros(40, hidden + 1))),
        completion("of no rows and a text", prompt_embeds=[]),
        completion("of rows and a text", prompt_embeds=one),
        *(case for name, messages in chats.items() for case in both(chat(f"of rows {name}", messages=messages))),
        *(chat(f"of rows with {name}", messages=[{"role": "user", "content": [content]}])
          for name, content in bad.items()),
    ]  # fmt: skip


def encoded(rows: torch.Tensor) -> str:
    """base64 of `torch.save`."""
    file = io.BytesIO()
    torch.save(rows, file)
    return base64.b64encode(file.getvalue()).decode()
