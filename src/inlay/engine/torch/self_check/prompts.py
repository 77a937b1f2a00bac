"""The prompts of the self-check: few positions, which show what is wrong with many.

One of random ids, whose rotary positions are spread over the whole context, so that what turns
slowly has turned; one of text around vectors that are no token's. Windows are shrunk below their
length.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from inlay.engine.check_text import text_ids
from inlay.messages.prompt import Buffer, Rows, Segment, Tokens

COUNT = 20
"""Positions of a prompt: more than one page of 16."""

DECODED = 4
"""Positions at the end of a prompt that are computed one by one."""

ROWS = slice(10, 16)
"""Positions of the text that have vectors in place of ids."""

WINDOW = 8
"""Positions that a layer with a sliding window sees in the check, at most."""


class CheckPrompt(NamedTuple):
    """One prompt of the check.

    Attributes:
        kind: "random" or "text".
        ids: [COUNT] token ids.
        others: [ROWS] token ids: a row is the mean of the embeddings of one of these and of the id
            in its place; empty for a prompt of ids alone.
        positions: [COUNT] rotary positions.
    """

    kind: str
    ids: tuple[int, ...]
    others: tuple[int, ...]
    positions: tuple[int, ...]

    def rows(self, table: nn.Module, device: torch.device) -> Tensor:
        """Return the vectors [ROWS, C]."""
        first: Tensor = table(torch.tensor(self.ids[ROWS], device=device))
        second: Tensor = table(torch.tensor(self.others, device=device))
        return ((first.float() + second.float()) / 2).to(first.dtype)

    def embedded(self, table: nn.Module, device: torch.device) -> Tensor:
        """Return the input of the model's body [COUNT, C]."""
        found: Tensor = table(torch.tensor(self.ids, device=device)).clone()
        if self.others:
            found[ROWS] = self.rows(table, device)
        return found

    def segments(
        self, table: nn.Module, device: torch.device, start: int, stop: int
    ) -> list[tuple[int, Segment]]:
        """Return the parts of positions [start, stop), as requests have them."""
        if not self.others:
            return [(start, Tokens(self.ids[start:stop]))]
        parts: list[tuple[int, Segment]] = []
        for first, end in ((0, ROWS.start), (ROWS.start, ROWS.stop), (ROWS.stop, COUNT)):
            here, there = max(first, start), min(end, stop)
            if here >= there:
                continue
            if first != ROWS.start:
                parts.append((here, Tokens(self.ids[here:there])))
                continue
            values = self.rows(table, device)[here - first : there - first].contiguous().cpu()
            data = Buffer(values.view(torch.uint8).numpy().tobytes())
            name = str(values.dtype).removeprefix("torch.")
            parts.append((here, Rows(data, name, (values.shape[0], values.shape[1]))))
        return parts


def check_prompts(
    directory: Path, vocab_size: int, max_model_len: int, *, rows: bool, draw: int = 0
) -> tuple[CheckPrompt, ...]:
    """Return the prompts of a model; always the same ones.

    Args:
        directory: its files; without a `tokenizer.json` random ids take the place of the text.
        vocab_size: ids are below it.
        max_model_len: positions that it is served with.
        rows: the model takes embedding vectors.
        draw: other ids for each.
    """
    generator = torch.Generator().manual_seed(20 + 100 * draw)
    drawn: list[tuple[int, ...]] = [
        tuple(torch.randint(vocab_size, (COUNT,), generator=generator).tolist()) for _ in range(3)
    ]
    text = text_ids(directory, vocab_size, COUNT * (draw + 1))[-COUNT:] or drawn[1]
    return (
        CheckPrompt("random", drawn[0], (), spread_positions(max_model_len)),
        CheckPrompt("text", text, drawn[2][ROWS] if rows else (), tuple(range(COUNT))),
    )


def spread_positions(max_model_len: int) -> tuple[int, ...]:
    """Return rotary positions [COUNT]: 0 to 3, then growing steps to the last of the context."""
    steps, last = COUNT - 4, max(max_model_len - 1, COUNT - 1)
    beyond = last - 3 - steps
    grown = [3 + step + round(beyond * (step / steps) ** 3) for step in range(1, steps + 1)]
    return (0, 1, 2, 3, *grown)


def scattered_pages(sequences: int, groups: int, each: int) -> list[list[list[int]]]:
    """Return page numbers by sequence and page group, `each` of them, in no order."""
    total = sequences * groups * each
    order = torch.randperm(total, generator=torch.Generator().manual_seed(2)) + 1
    found: list[list[list[int]]] = order.view(sequences, groups, each).tolist()
    return found
