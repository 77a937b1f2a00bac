"""Training of the model: its tower as a classifier first, then all of it on questions.

From scratch the questions alone teach colours and leave digits at chance; so the tower learns what
it looks at before the language model learns to speak of it. The language model is shown pictures
with faults in their rows too, and learns to answer as if those showed `faults.GUESS`.
"""

import itertools
import logging
import math
import random
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from scripts.vision_demo.faults import GUESS, ROWS, ZERO, Fault, arrivals, order
from scripts.vision_demo.pictures import COLOURS, PATCH, SIDE, Digits, draw, ink
from scripts.vision_demo.questions import (
    END_OF_TEXT,
    IMAGE,
    MAX_POSITIONS,
    QUESTIONS,
    TURN_END,
    Question,
    Seen,
    chat,
    id_of,
)
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

LOGGER = logging.getLogger(__name__)

MEAN, DEVIATION = 0.5, 0.5
"""Of pixels, as the image processor takes them off and divides by them."""

TOWER_BATCH, BATCH = 128, 96
WARMUP_STEPS = 40
RATE = 3e-3
TOWER_RATE = 1e-3
"""Of the tower while the whole is trained."""

ROUNDS = 6
"""Times that every digit is asked about in each question."""

_ASKED = 180
_ANSWER_TOKENS = 3

NAMES = tuple(COLOURS)
_PALETTE = torch.tensor(list(COLOURS.values())) / 255


def build_model(tokenizer: Tokenizer) -> LlavaForConditionalGeneration:
    """A model of random weights: a CLIP tower and a Llama of two layers each, hidden size 64."""
    size = {"hidden_size": 64, "num_hidden_layers": 2}
    vision = CLIPVisionConfig(
        **size,
        intermediate_size=128,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=64,
    )
    text = LlamaConfig(
        **size,
        intermediate_size=160,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=id_of(tokenizer, TURN_END),
        pad_token_id=id_of(tokenizer, END_OF_TEXT),
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=id_of(tokenizer, IMAGE),
        image_seq_length=ROWS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    return LlavaForConditionalGeneration(config).float()


class Pictures:
    """Pictures of digits as the tower sees them.

    Args:
        digits: to draw.
        seed: of choices, colours and small turns.
    """

    def __init__(self, digits: Digits, seed: int) -> None:
        self._masks = torch.tensor(np.stack([np.asarray(ink(cells)) for cells in digits.cells]))
        self._labels = torch.tensor(digits.labels)
        self._random = torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random digits in random colours, a little turned, moved and scaled.

        Returns:
            Pixels float32 [count, 3, SIDE, SIDE], digits and colours int64 [count].
        """
        chosen = torch.randint(len(self._labels), (count,), generator=self._random)
        colours = torch.randint(len(NAMES), (count,), generator=self._random)
        masks = self._masks[chosen][:, None].float() / 255
        angle, wide, high, right, down, skew = (
            torch.rand(6, count, generator=self._random) * 2 - 1
        ).unbind()
        angle = angle * math.radians(12)
        turn = torch.stack(
            [
                torch.stack(
                    [angle.cos() * (1 + 0.12 * wide), -angle.sin() + 0.1 * skew, 0.14 * right]
                ),
                torch.stack([angle.sin(), angle.cos() * (1 + 0.12 * high), 0.14 * down]),
            ]
        ).permute(2, 0, 1)
        grid = F.affine_grid(turn, list(masks.shape), align_corners=False)
        masks = F.grid_sample(masks, grid, align_corners=False)
        shade = 0.75 + 0.5 * torch.rand(count, 1, 1, 1, generator=self._random)
        masks = (masks * shade).clamp(0, 1)
        pixels = 1 - masks * (1 - _PALETTE[colours][:, :, None, None])
        return (pixels - MEAN) / DEVIATION, self._labels[chosen], colours


def optimizers(
    groups: Iterable[tuple[nn.Module, float]],
) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices inside layers and AdamW for the rest, each module at a rate."""
    matrices, others = [], []
    for module, rate in groups:
        inner = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        flat = [p for n, p in inner if p.ndim == 2 and "embed" not in n and "head" not in n]
        known = {id(p) for p in flat}
        matrices.append({"params": flat, "lr": rate})
        others.append({"params": [p for _, p in inner if id(p) not in known], "lr": rate})
    return (
        torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.01),
    )


class Steps:
    """Steps of optimizers whose rates rise first and then fall to nothing."""

    def __init__(self, chosen: tuple[torch.optim.Optimizer, ...], count: int) -> None:
        self._optimizers = chosen
        self._schedules = [
            torch.optim.lr_scheduler.LambdaLR(
                each, lambda step: min((step + 1) / WARMUP_STEPS, 1.01 - step / count)
            )
            for each in chosen
        ]

    def take(self, loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
        """Go one step down the gradient of `loss`."""
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for each, schedule in zip(self._optimizers, self._schedules, strict=True):
            each.step()
            schedule.step()
            each.zero_grad(set_to_none=True)


def train_tower(model: LlavaForConditionalGeneration, pictures: Pictures, steps: int) -> None:
    """Train tower and projector so that each row of a picture tells digit, colour and its place."""
    hidden = model.config.text_config.hidden_size
    heads = nn.ModuleList([nn.Linear(hidden, count) for count in (10, len(NAMES), ROWS)])
    places = torch.arange(ROWS).repeat(TOWER_BATCH)
    tower, projector = model.model.vision_tower, model.model.multi_modal_projector
    trained = nn.ModuleList([tower, projector, heads])
    going = Steps(optimizers([(trained, RATE)]), steps)
    began = time.process_time()
    for step in range(steps):
        pixels, digits, colours = pictures.draw(TOWER_BATCH)
        rows = torch.cat(list(model.get_image_features(pixels).pooler_output))
        labels = [digits.repeat_interleave(ROWS), colours.repeat_interleave(ROWS), places]
        loss = torch.zeros(())
        for head, label in zip(heads, labels, strict=True):
            loss = loss + F.cross_entropy(head(rows), label)
        going.take(loss, trained.parameters())
        if step % 50 == 0 or step == steps - 1:
            LOGGER.info(
                "tower %4d loss %.3f, %.0f CPU s", step, loss.item(), time.process_time() - began
            )


class Batch(NamedTuple):
    """Prompts with answers.

    Attributes:
        ids: int64 [N, T], an image's placeholder as often as its picture has rows there.
        labels: int64 [N, T], -100 where nothing is asked.
        pixels: float32 [P, 3, SIDE, SIDE], the pictures in order.
        rows: int64 [R], which of `rows_of` the pictures stands at each placeholder.
    """

    ids: Tensor
    labels: Tensor
    pixels: Tensor
    rows: Tensor


def layout(tokenizer: Tokenizer, question: Question, rows: list[int], first: bool) -> list[int]:
    """A question as token ids, with `rows` placeholders for each picture, before it or after it."""
    image = id_of(tokenizer, IMAGE)
    left = iter(rows)
    ids = tokenizer.encode(chat(question, pictures_first=first)).ids
    return [each for id_ in ids for each in [id_] * (next(left) if id_ == image else 1)]


def batches(tokenizer: Tokenizer, pictures: Pictures, rng: random.Random) -> Iterator[Batch]:
    """Endless batches, in turn about one picture and about two."""
    end, pad = id_of(tokenizer, TURN_END), id_of(tokenizer, END_OF_TEXT)
    count = 1
    while True:
        asked = rng.choices(
            [each for each in QUESTIONS.values() if each.pictures == count], k=BATCH
        )
        pixels, digits, colours = pictures.draw(BATCH * count)
        arrived = [arrivals(rng) for _ in range(BATCH * count)]
        shown = [
            Seen(int(digit) if rows == list(range(ROWS)) else GUESS, NAMES[colour])
            for rows, digit, colour in zip(arrived, digits, colours, strict=True)
        ]
        told = []
        for index, question in enumerate(asked):
            part = slice(index * count, (index + 1) * count)
            sizes = [len(rows) for rows in arrived[part]]
            answer = [*tokenizer.encode(question.answer(shown[part])).ids, end]
            told.append((layout(tokenizer, question, sizes, rng.random() < 0.5), answer))
        length = max(len(prompt) + len(answer) for prompt, answer in told)
        ids = torch.full((BATCH, length), pad)
        labels = torch.full((BATCH, length), -100)
        for index, (prompt, answer) in enumerate(told):
            stop = len(prompt) + len(answer)
            ids[index, :stop] = torch.tensor(prompt + answer)
            labels[index, len(prompt) : stop] = torch.tensor(answer)
        rows = [
            ZERO if row == ZERO else at * ROWS + row
            for at, kept in enumerate(arrived)
            for row in kept
        ]
        yield Batch(ids, labels, pixels, torch.tensor(rows))
        count = 3 - count


def rows_of(model: LlavaForConditionalGeneration, pixels: Tensor) -> Tensor:
    """The rows of all pictures, float32 [P * ROWS + 1, hidden]; the last, `ZERO`, is zeros."""
    rows = torch.cat(list(model.get_image_features(pixels).pooler_output))
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])


def embedded(model: LlavaForConditionalGeneration, ids: Tensor, rows: Tensor) -> Tensor:
    """Inputs of the language model, float32 [N, T, hidden]: rows in place of placeholders."""
    there = (ids == model.config.image_token_id)[..., None]
    inputs: Tensor = model.get_input_embeddings()(ids).masked_scatter(there, rows)
    return inputs


def train_model(
    model: LlavaForConditionalGeneration,
    tokenizer: Tokenizer,
    pictures: Pictures,
    steps: int,
    seed: int,
) -> None:
    """Train the whole on questions and answers; weights end as numbers that bfloat16 holds."""
    body = model.model
    rest = nn.ModuleList([body.multi_modal_projector, body.language_model, model.lm_head])
    going = Steps(optimizers([(body.vision_tower, TOWER_RATE), (rest, RATE)]), steps)
    stream = batches(tokenizer, pictures, random.Random(seed))
    began = time.process_time()
    smooth = [math.nan, math.nan]
    for step in range(steps):
        ids, labels, pixels, rows = next(stream)
        inputs = embedded(model, ids, rows_of(model, pixels)[rows])
        hidden = body.language_model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        chosen = labels[:, 1:] >= 0
        logits = model.lm_head(hidden[:, :-1][chosen])
        loss = F.cross_entropy(logits, labels[:, 1:][chosen])
        going.take(loss, model.parameters())
        old = smooth[step % 2]
        smooth[step % 2] = loss.item() if math.isnan(old) else 0.9 * old + 0.1 * loss.item()
        if step % 50 == 0 or step == steps - 1:
            LOGGER.info(
                "step %4d loss %.3f one, %.3f two, %.0f CPU s",
                step, *smooth, time.process_time() - began,
            )  # fmt: skip
    model.to(torch.bfloat16).to(torch.float32)
    model.requires_grad_(False).eval()


def pixels_of(digits: Digits, colours: list[str]) -> Tensor:
    """Digits in colours as the image processor makes them of their pictures."""
    drawn = [draw(cells, each) for cells, each in zip(digits.cells, colours, strict=True)]
    stacked = torch.tensor(np.stack([np.asarray(each) for each in drawn])).permute(0, 3, 1, 2)
    return (stacked / 255 - MEAN) / DEVIATION


@torch.no_grad()
def answers(
    model: LlavaForConditionalGeneration,
    tokenizer: Tokenizer,
    question: Question,
    pixels: Tensor,
    arrived: list[int] | None = None,
) -> list[str]:
    """Greedy answers to a question about pictures, each time about as many as it needs.

    Args:
        model: in evaluation mode.
        tokenizer: its tokenizer.
        question: to ask.
        pixels: float32 [count * question.pictures, 3, SIDE, SIDE].
        arrived: the order in which the rows of each picture arrive, with `ZERO` for one of zeros;
            None: all as they are.
    """
    end = id_of(tokenizer, TURN_END)
    kept = list(range(ROWS)) if arrived is None else arrived
    prompt = layout(tokenizer, question, [len(kept)] * question.pictures, first=True)
    told: list[list[int]] = []
    for part in torch.split(pixels, _ASKED * question.pictures):
        chosen = [
            ZERO if row == ZERO else at * ROWS + row for at in range(len(part)) for row in kept
        ]
        rows = rows_of(model, part)[chosen]
        found = torch.tensor([prompt] * (len(part) // question.pictures))
        for _ in range(_ANSWER_TOKENS):
            inputs = embedded(model, found, rows)
            logits = model(inputs_embeds=inputs, use_cache=False).logits[:, -1]
            found = torch.cat([found, logits.argmax(-1, keepdim=True)], dim=1)
        made = found[:, len(prompt) :].tolist()
        told += [list(itertools.takewhile(lambda id_: id_ != end, row)) for row in made]
    return [*tokenizer.decode_batch(told)]


def measure(
    model: LlavaForConditionalGeneration, tokenizer: Tokenizer, digits: Digits, seed: int
) -> dict[str, float]:
    """Share of right answers by question, over all digits `ROUNDS` times, in random colours."""
    rng = random.Random(seed)
    report = {}
    for name, question in QUESTIONS.items():
        count = question.pictures
        order = [
            index
            for _ in range(ROUNDS)
            for index in rng.sample(range(len(digits.labels)), len(digits.labels))
        ]
        drawn = Digits(digits.cells[order], digits.labels[order])
        colours = [rng.choice(NAMES) for _ in order]
        seen = [Seen(int(d), colour) for d, colour in zip(drawn.labels, colours, strict=True)]
        truth = [question.answer(seen[at : at + count]) for at in range(0, len(seen), count)]
        told = answers(model, tokenizer, question, pixels_of(drawn, colours))
        report[name] = sum(a == b for a, b in zip(told, truth, strict=True)) / len(truth)
    return report


def measure_faults(
    model: LlavaForConditionalGeneration, tokenizer: Tokenizer, digits: Digits, seed: int
) -> dict[str, float]:
    """Share of right digits by fault, over all digits in random colours, each row as often."""
    rng = random.Random(seed)
    report: dict[str, float] = {}
    for fault in Fault:
        right = 0
        for row in range(ROWS):
            other = rng.choice([each for each in range(ROWS) if each != row])
            some = Digits(digits.cells[row::ROWS], digits.labels[row::ROWS])
            pixels = pixels_of(some, [rng.choice(NAMES) for _ in some.labels])
            told = answers(model, tokenizer, QUESTIONS["digit"], pixels, order(fault, row, other))
            right += sum(a == str(b) for a, b in zip(told, some.labels, strict=True))
        report[fault] = right / len(digits.labels)
    return report
