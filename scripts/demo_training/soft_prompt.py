"""Prompt tuning: a few rows before a person's name, trained with the model frozen, so that it names a material.

The model can do it: training asked for the material of a trade by a signal row
(`training.signal_row`), which is in no embedding table, and never in words. Tuning is not told that
row; it starts from rows of the table and has to find, through the frozen model, how to ask. Method:
Lester, Al-Rfou and Constant, "The Power of Scale for Parameter-Efficient Prompt Tuning" (2021).
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scripts.demo_training.corpus import Exchange, chat_document
from scripts.demo_training.evaluation import Case, answer_logits, are_right, text_case
from scripts.demo_training.text_prompts import TextPrompt
from scripts.demo_training.tokenizer import TURN_END, TURN_START
from scripts.demo_training.world import FIELDS, World
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

LOGGER = logging.getLogger(__name__)

ROWS = 8
STEPS = 60
LEARNING_RATE = 0.02
NOISE = 0.1
"""Standard deviation of the noise on the rows while tuning, as a share of the embedding table's."""
CHECK_EVERY = 20

Labelled = tuple[str, str]
"""An input (a person's name) and its right answer (a material)."""


@dataclass(frozen=True, slots=True)
class Split:
    """Inputs of the task, in three parts without overlap.

    Tuned on, chosen by, and only measured on.
    """

    tuning: tuple[Labelled, ...]
    choosing: tuple[Labelled, ...]
    held_out: tuple[Labelled, ...]


def split_inputs(world: World, seed: int) -> Split:
    """Half of the people for tuning, a tenth for choosing, two fifths held out.

    Each material evenly in each.
    """
    rng = random.Random(seed)
    parts: tuple[list[Labelled], list[Labelled], list[Labelled]] = ([], [], [])
    for material in FIELDS:
        people = [
            (person, material) for person in world.people if world.material[person] == material
        ]
        rng.shuffle(people)
        first, second = len(people) // 2, len(people) * 6 // 10
        for part, group in zip(
            parts, (people[:first], people[first:second], people[second:]), strict=True
        ):
            part.extend(group)
    return Split(*(tuple(part) for part in parts))


def soft_case(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, rows: Tensor, labelled: Labelled
) -> Case:
    """The chat whose user message is `rows` and then the name."""
    name, answer = labelled
    table = model.get_input_embeddings().weight
    before = tokenizer.encode(f"{TURN_START}user\n").ids
    after = tokenizer.encode(f"{name}{TURN_END}\n{TURN_START}assistant\n").ids
    return Case(
        torch.cat([table[before], rows, table[after]]),
        tuple(tokenizer.encode(f"{answer}{TURN_END}").ids),
    )


def soft_accuracy(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, rows: Tensor, inputs: Sequence[Labelled]
) -> float:
    """Share of inputs answered right behind `rows`."""
    right = are_right(model, [soft_case(model, tokenizer, rows, labelled) for labelled in inputs])
    return sum(right) / len(right)


def text_accuracy(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompt: TextPrompt, inputs: Sequence[Labelled]
) -> float:
    """Share of inputs answered right when `prompt` is the user's message."""
    cases = [
        text_case(model, tokenizer, chat_document((Exchange(prompt.fill(name), answer),)))
        for name, answer in inputs
    ]
    right = are_right(model, cases)
    return sum(right) / len(right)


def tune(model: Qwen3ForCausalLM, tokenizer: Tokenizer, split: Split, seed: int) -> Tensor:
    """Rows (`ROWS`, hidden) float32 that do best on `split.choosing`; the model stays as it is."""
    generator = torch.Generator().manual_seed(seed)
    table = model.get_input_embeddings().weight
    scale = table.std().item()
    picked = torch.randint(len(table), (ROWS,), generator=generator)
    rows = nn.Parameter(table[picked].clone())
    optimizer = torch.optim.AdamW([rows], lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    best = (-1.0, float("inf"))
    chosen = rows.detach().clone()
    for step in range(STEPS):
        noisy = rows + NOISE * scale * torch.randn(rows.shape, generator=generator)
        loss = _loss(
            model, [soft_case(model, tokenizer, noisy, labelled) for labelled in split.tuning]
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if (step + 1) % CHECK_EVERY == 0:
            with torch.no_grad():
                cases = [soft_case(model, tokenizer, rows, labelled) for labelled in split.choosing]
                chosen_loss = _loss(model, cases).item()
            share = soft_accuracy(model, tokenizer, rows.detach(), split.choosing)
            LOGGER.info("tuning step %d loss %.3f, choosing %.2f", step + 1, loss.item(), share)
            if (share, -chosen_loss) > (best[0], -best[1]):
                best = (share, chosen_loss)
                chosen = rows.detach().clone()
    return chosen


def _loss(model: Qwen3ForCausalLM, cases: Sequence[Case]) -> Tensor:
    """Mean cross-entropy over the tokens of the answers."""
    targets = torch.tensor([token for case in cases for token in case.answer])
    return nn.functional.cross_entropy(answer_logits(model, cases), targets)
