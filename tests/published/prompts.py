"""Prompts that each served checkpoint is asked."""

import random

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


_drawn = random.Random(7)

PROMPTS: list[object] = [*TEXTS, [_drawn.randrange(10, 100_000) for _ in range(24)]]
"""Texts of several kinds, and ids that mean nothing."""
