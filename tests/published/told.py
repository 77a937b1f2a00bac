"""What each served checkpoint answers to the same prompts, all asked at once."""

import random
from functools import cache

import httpx

from tests.published.conftest import checkpoint, served_by_default
from tests.published.numbers import Answer, answers

QWEN, GEMMA = "qwen2.5-coder-1.5b-instruct", "gemma-3-270m"

CODE = '''def merge(left: list[int], right: list[int]) -> list[int]:
    """Merge two sorted lists."""
    merged = []
    while left and right:
'''
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\nWhy is the sky blue? One sentence.<|im_end|>\n<|im_start|>assistant\n"
)
TEXTS = (
    "The capital of France is",
    CODE,
    CHAT,
    "À Paris, la bibliothèque ouvre à neuf heures. 東京の天気は晴れです。 Привет, мир!",
    "one two three four five six seven eight nine ten " * 6,
)


def prompts_of(name: str) -> list[object]:
    """Texts of several kinds, and ids that mean nothing."""
    drawn = random.Random(7)
    return [*TEXTS, [drawn.randrange(10, 100_000) for _ in range(24)]]


@cache
def told(name: str) -> list[Answer]:
    """The answers to `prompts_of`, of a server that has ended again."""
    with (
        served_by_default(checkpoint(name)) as server,
        httpx.Client(base_url=server.url, timeout=400) as http,
    ):
        return answers(http, prompts_of(name))
