"""A server under attack, and who keeps asking it properly meanwhile.

The same answers, and memory that stays where it was.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from tests.equality.reference import greedy, rows_of, tokenizer_of
from tests.models import EOS_ID
from tests.payloads import saved
from tests.serving import Served

MIB = 1024 * 1024
SLACK = 48 * MIB
"""Bytes by which memory may vary: allocators, new threads.

Every bomb in these tests is far larger.
"""

TOKENS = 8
PATIENCE = 90.0
"""Seconds after which a server that does not answer counts as dead; nothing is compared with it."""


@dataclass(frozen=True)
class Question:
    """Request of a good client, and the tokens of plain `transformers` for it."""

    path: str
    body: dict[str, Any]
    answer: list[int]

    def ask(self, client: httpx.Client) -> list[int]:
        """The tokens the server answers, without an end token."""
        response = client.post(self.path, json=self.body)
        if response.status_code != 200:
            raise AssertionError(f"a good client got {response.status_code}: {response.text[:500]}")
        return shown(response.json())


def shown(answer: dict[str, Any]) -> list[int]:
    """The tokens of the first choice, without an end token."""
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids[:-1] if ids and ids[-1] == EOS_ID else ids


def settings(max_tokens: int = TOKENS) -> dict[str, Any]:
    """The part of a body that makes an answer one to compare."""
    return {"max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}


def expected(path: Path, rows: torch.Tensor) -> list[int]:
    """Return the model's tokens after (n, hidden) rows."""
    ids = greedy(path, rows, TOKENS)
    return ids[:-1] if ids[-1] == EOS_ID else ids


def questions(path: Path) -> tuple[Question, ...]:
    """Something asked as text, something else as embeddings, and a chat of both."""
    tokenizer = tokenizer_of(path)
    texts = ("count the lanterns of the harbour", "Hello world, what is the capital of the island?")
    first, second = (rows_of(path, tokenizer.encode(text)) for text in texts)
    found = (
        Question("/v1/completions", {"prompt": texts[0], **settings()}, expected(path, first)),
        Question(
            "/v1/completions",
            {"prompt_embeds": saved(second), **settings()},
            expected(path, second),
        ),
    )
    content = [{"type": "text", "text": "what is"}, {"type": "prompt_embeds", "data": saved(first)}]
    before, after = ("<|im_start|>user\nwhat is", "<|im_end|>\n<|im_start|>assistant\n")
    rows = torch.cat(
        (
            rows_of(path, tokenizer.encode(before)),
            first,
            rows_of(path, tokenizer.encode(after)),
        )
    )
    body = {"messages": [{"role": "user", "content": content}], **settings()}
    return (*found, Question("/v1/chat/completions", body, expected(path, rows)))


@dataclass
class Company:
    """Asks the questions over and over in a thread of its own.

    Attributes:
        rounds: how many times all of them were answered as they should be.
        fault: the first thing that was not.
    """

    served: Served
    asked: Sequence[Question]
    rounds: int = 0
    fault: BaseException | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self.served.url, timeout=PATIENCE) as client:
                while not self._stop.is_set():
                    for question in self.asked:
                        got = question.ask(client)
                        if got != question.answer:
                            raise AssertionError(
                                f"{question.body}: {got} instead of {question.answer}"
                            )
                    self.rounds += 1
        except BaseException as error:
            self.fault = error

    def wait(self, rounds: int) -> None:
        """Return when `rounds` more have been completed. Raises what went wrong instead."""
        wanted = self.rounds + rounds
        deadline = time.monotonic() + PATIENCE
        while self.rounds < wanted:
            if self.fault is not None:
                raise self.fault
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{self.rounds} of {wanted} rounds were answered within {PATIENCE:g} s"
                )
            time.sleep(0.01)

    @contextmanager
    def asking(self) -> Iterator["Company"]:
        """Ask until the block ends."""
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()
        if self.fault is not None:
            raise self.fault


def processes(served: Served) -> list[psutil.Process]:
    """The frontend and its worker."""
    first = psutil.Process(served.process.pid)
    return [first, *first.children(recursive=True)]


def resident(served: Served) -> int:
    """Bytes of memory the server has now, all its processes together."""
    return sum(process.memory_info().rss for process in processes(served))


def forget_peaks(served: Served) -> None:
    """Begin to note the largest size of each process anew."""
    for process in processes(served):
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def peaks(served: Served) -> int:
    """Sum of the largest sizes of the processes since `forget_peaks`."""
    total = 0
    for process in processes(served):
        status = Path(f"/proc/{process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
        total += int(line.split()[1]) * 1024
    return total


Attack = Callable[[httpx.Client], object]


def named(name: str, attack: Attack) -> Attack:
    """`attack`, whose failure says which it was."""

    def run(client: httpx.Client) -> None:
        try:
            attack(client)
        except BaseException as error:
            error.add_note(f"the attack was: {name}")
            raise

    return run


def under_attack(
    served: Served,
    asked: Sequence[Question],
    attacks: Sequence[Attack],
    *,
    attackers: int = 2,
    grows: int = 0,
) -> None:
    """Run `attacks`, each at least once, over and over until the good client has had two rounds meanwhile and one after.

    Args:
        served: who is attacked.
        asked: what the good client asks.
        attacks: each is called with a client of its own thread, and asserts what it is answered.
        attackers: how many threads attack.
        grows: bytes by which memory may grow beyond `SLACK`, for bodies that are large in
            themselves.

    Raises:
        AssertionError: a wrong answer to anyone, or memory that grew.
    """
    turns = itertools.count()
    done = threading.Event()
    faults: list[BaseException] = []

    def attack() -> None:
        try:
            with httpx.Client(base_url=served.url, timeout=PATIENCE) as client:
                while not faults:
                    turn = next(turns)
                    if turn >= len(attacks) and done.is_set():
                        return
                    attacks[turn % len(attacks)](client)
        except BaseException as error:
            faults.append(error)

    with Company(served, asked).asking() as company:
        company.wait(1)
        before = resident(served)
        forget_peaks(served)
        threads = [threading.Thread(target=attack) for _ in range(attackers)]
        for thread in threads:
            thread.start()
        try:
            company.wait(2)
        finally:
            done.set()
            for thread in threads:
                thread.join()
        company.wait(1)
    for fault in faults:
        raise fault
    grown = peaks(served) - before
    assert grown <= SLACK + grows, f"memory grew by {grown / MIB:.0f} MiB"
    settle(lambda: held(served) == 0, "bytes of bodies are still held")


def settle(reached: Callable[[], bool], otherwise: str) -> None:
    """Return once `reached`; what is over for a client takes a moment to be over for the server."""
    deadline = time.monotonic() + PATIENCE
    while not reached():
        if time.monotonic() > deadline:
            raise AssertionError(otherwise)
        time.sleep(0.02)


def held(served: Served) -> int:
    """Bytes of bodies and embeddings the server says it holds."""
    lines = httpx.get(served.url + "/metrics").text.splitlines()
    (line,) = (line for line in lines if line.startswith("inlay:held_bytes "))
    return int(float(line.split()[1]))


def refused(response: httpx.Response, status: int, *phrases: str) -> dict[str, Any]:
    """The error of a response, which must be one of `status` and say all of `phrases`, and not much more."""
    body = response.json()
    assert list(body) == ["error"], body
    found: dict[str, Any] = body["error"]
    assert set(found) == {"message", "type", "param", "code"}
    message = found["message"]
    assert response.status_code == status, found
    assert all(phrase in message for phrase in phrases), message[:1000]
    return found
