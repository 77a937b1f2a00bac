"""What a server and transformers say of the same ids, and how far each is from float32."""

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

TOP = 20
"""Most likely tokens that are compared at each position; what a server gives at most by default."""
TOKENS = 24

FARTHER = 1.5
"""Most that our distance to float32 may be of transformers' own."""
NEAR = 0.25
"""Nats: where two tokens are as likely, rounding may choose."""
FLOOR = 1e-3
"""Nats under which two distances are alike."""


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    Attributes:
        prompt: its ids.
        output: its ids.
        said: for each position but the first, the logprobs of the most likely tokens that the
            server gave after the ids before it.
    """

    prompt: list[int]
    output: list[int]
    said: list[dict[int, float]]

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output


@dataclass(frozen=True)
class Steps:
    """Greedy tokens, and the logprobs of the most likely at each."""

    ids: list[int]
    said: list[dict[int, float]]

    @classmethod
    def of(cls, http: httpx.Client, prompt: object, **fields: object) -> "Steps":
        return cls.of_choice(ask(http, prompt, **fields))

    @classmethod
    def of_choice(cls, choice: dict[str, Any]) -> "Steps":
        said = [
            {int(name.removeprefix("token_id:")): value for name, value in each.items()}
            for each in choice["logprobs"]["top_logprobs"]
        ]
        return cls(choice["token_ids"], said)

    def expect(self, other: "Steps", *, exact: bool, what: str) -> None:
        """Fail unless they are the same, to the bit or up to where two tokens are near."""
        if exact:
            assert (self.ids, self.said) == (other.ids, other.said), what
        assert len(self.ids) == len(other.ids), what
        for one, its, said in zip(self.ids, other.ids, other.said, strict=True):
            if one != its:
                best, second, *_ = sorted(said.values(), reverse=True)
                assert best - second < NEAR, what
                return


def expect_checked(http: httpx.Client) -> None:
    """Fail unless the model passed the check at its start, with every module replaced."""
    (entry,) = http.get("/v1/models").json()["data"]
    check = entry["self_check"]
    print(f"{check['distance']} of the rounding of {check['reference']}")
    assert check["result"] == "passed", check
    assert check.get("left_out", []) == []
    assert check["num_modules"] > 100
    assert check["distance"] < FARTHER


def is_exact(http: httpx.Client) -> bool:
    """Whether a greedy answer has the same bits in any company, as the server says."""
    (entry,) = http.get("/v1/models").json()["data"]
    assert entry["dtype"] == "bfloat16"
    said: str = entry["resuming"]["greedy"]
    return said == "exact"


def ask(http: httpx.Client, prompt: object, **fields: object) -> dict[str, Any]:
    """The only choice of a greedy completion of `TOKENS` tokens, called by their ids."""
    asked = {"model": "m", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    shown = {"logprobs": TOP, "return_token_ids": True, "return_tokens_as_token_ids": True}
    done = http.post("/v1/completions", json={"prompt": prompt, **asked, **shown, **fields})
    assert done.status_code == 200, done.text
    (choice,) = done.json()["choices"]
    found: dict[str, Any] = choice
    return found


def answer(http: httpx.Client, prompt: object, **fields: object) -> Answer:
    """A greedy answer, with the numbers of prompt and answer."""
    choice = ask(http, prompt, prompt_logprobs=TOP, **fields)
    steps = Steps.of_choice(choice)
    return Answer(choice["prompt_token_ids"], steps.ids, read(choice) + steps.said)


def read(choice: dict[str, Any]) -> list[dict[int, float]]:
    """What a choice says of its prompt: the logprobs at each id but the first."""
    return [
        {int(id_): value["logprob"] for id_, value in each.items()}
        for each in choice["prompt_logprobs"][1:]
    ]


def answers(http: httpx.Client, prompts: Sequence[object]) -> list[Answer]:
    """The answers to all of them, asked at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: answer(http, prompt), prompts))


@lru_cache(maxsize=1)
def _loaded(path: Path) -> Any:
    """The last one is kept: tests of a model stand behind each other."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()


@contextmanager
def reference(path: Path) -> Iterator[Any]:
    """transformers' model in bfloat16 with its fused attention, on every core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        yield _loaded(path)
    finally:
        torch.set_num_threads(threads)


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Compute in float32 within this context, one module's weights at a time.

    Widened and rounded again they are what they were, and a large model is never there twice.
    """

    def cast(module: Any, dtype: torch.dtype) -> None:
        for each in module.parameters(recurse=False):
            each.data = each.data.to(dtype)

    handles: list[Any] = []
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            handles += [
                module.register_forward_pre_hook(lambda each, _: cast(each, torch.float32)),
                module.register_forward_hook(lambda each, *_: cast(each, torch.bfloat16)),
            ]
    yield
    for handle in handles:
        handle.remove()


@torch.no_grad()
def logprobs(model: Any, answers: Sequence[Answer]) -> list[Tensor]:
    """What a model says after each id of an answer but the last: [positions, vocabulary].

    All in one pass, in which weights are read and cast once: what pads an answer stands behind it,
    where it sees nothing of it.
    """
    ids = [torch.tensor(each.ids[:-1]) for each in answers]
    logits = model(pad_sequence(ids, batch_first=True)).logits
    return [row[: len(own)].float().log_softmax(-1) for row, own in zip(logits, ids, strict=True)]


@dataclass(frozen=True)
class Distance:
    """From float32, by position: the root mean square, in nats, over the tokens that were given."""

    served: list[float]
    transformers: list[float]

    @classmethod
    def all_of(cls, parts: Sequence["Distance"]) -> "Distance":
        return cls(
            [each for part in parts for each in part.served],
            [each for part in parts for each in part.transformers],
        )

    def of(self, start: int, stop: int | None = None) -> "Distance":
        """At some positions."""
        return Distance(self.served[start:stop], self.transformers[start:stop])

    def ratio(self) -> float:
        """The geometric mean of one over the other."""
        logs = [
            math.log((one + FLOOR) / (other + FLOOR))
            for one, other in zip(self.served, self.transformers, strict=True)
        ]
        return math.exp(sum(logs) / len(logs))


def distance(answer: Answer, exact: Tensor, rounded: Tensor) -> Distance:
    """How far the server, and transformers in its dtype, are from float32."""
    served, own = [], []
    for position, said in enumerate(answer.said):
        ids = torch.tensor(list(said))
        truth = exact[position, ids]
        served.append(float((torch.tensor(list(said.values())) - truth).square().mean().sqrt()))
        own.append(float((rounded[position, ids] - truth).square().mean().sqrt()))
    return Distance(served, own)


def gaps(answer: Answer, exact: Tensor) -> list[float]:
    """At each token of an answer, how much more likely, in nats, float32's first choice was."""
    rows = exact[len(answer.prompt) - 1 :]
    chosen = rows.gather(1, torch.tensor(answer.output)[:, None])[:, 0]
    found: list[float] = (rows.max(-1).values - chosen).tolist()
    return found
