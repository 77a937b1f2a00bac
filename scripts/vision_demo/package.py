"""Writing the files of `inlay.demo` that have to do with images."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from scripts.vision_demo.faults import FAULTY, GUESS
from scripts.vision_demo.pictures import COLOURS, PATCH, SIDE, Digits, draw, png
from scripts.vision_demo.questions import (
    END_OF_TEXT,
    IMAGE,
    QUESTIONS,
    TURN_END,
    Seen,
    id_of,
    write_tokenizer,
)
from scripts.vision_demo.training import DEVIATION, MEAN, answers, pixels_of
from tokenizers import Tokenizer
from transformers import CLIPImageProcessorPil, LlavaForConditionalGeneration

from inlay.demo import DigitPicture, VisionExample, VisionExamples

_ONE = [name for name, question in QUESTIONS.items() if question.pictures == 1]
_TWO = [name for name, question in QUESTIONS.items() if question.pictures == 2]


def write_model(
    model: LlavaForConditionalGeneration, tokenizer: Tokenizer, directory: Path
) -> None:
    """Write a model directory as `transformers`, inlay and vLLM read it, weights in bfloat16.

    Args:
        model: weights in float32 that bfloat16 holds exactly.
        tokenizer: its tokenizer.
        directory: made if it is not there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    model.to(torch.float32)
    weights = directory / "model.safetensors"
    # As in published LLaVAs, and as vLLM wants them; transformers reads both.
    named = {
        name.replace("vision_tower.", "vision_tower.vision_model."): value
        for name, value in load_file(weights).items()
    }
    save_file(named, weights, metadata={"format": "pt"})
    end, pad = id_of(tokenizer, TURN_END), id_of(tokenizer, END_OF_TEXT)
    _write_json(
        directory / "generation_config.json",
        {"do_sample": False, "eos_token_id": end, "pad_token_id": pad},
    )
    side = {"height": SIDE, "width": SIDE}
    CLIPImageProcessorPil(
        size={"shortest_edge": SIDE},
        crop_size=side,
        image_mean=[MEAN] * 3,
        image_std=[DEVIATION] * 3,
    ).save_pretrained(directory)
    _write_json(
        directory / "processor_config.json",
        {
            "processor_class": "LlavaProcessor",
            "image_token": IMAGE,
            "num_additional_image_tokens": 1,
            "patch_size": PATCH,
            "vision_feature_select_strategy": "default",
        },
    )
    write_tokenizer(tokenizer, directory)


def write_examples(
    model: LlavaForConditionalGeneration,
    tokenizer: Tokenizer,
    held_out: Digits,
    report: dict[str, float],
    out: Path,
    seed: int,
) -> None:
    """Write pictures of one digit of each kind with its rows, and questions about them.

    Only digits of `held_out` are drawn, and only those about which every question is answered
    right; none is `GUESS`, so that the answer to a picture with a fault is another one.

    Args:
        model: as it is served.
        tokenizer: its tokenizer.
        held_out: digits that the model was not trained by.
        report: accuracy by question, written beside them.
        out: folder of `inlay.demo`.
        seed: of choices.
    """
    rng = random.Random(seed)
    folder = out / "pictures"
    folder.mkdir(exist_ok=True)
    for earlier in folder.iterdir():
        earlier.unlink()
    shown: dict[int, tuple[Seen, Digits]] = {}
    for colour in rng.sample(list(COLOURS), len(COLOURS)):
        for index in rng.sample(range(len(held_out.labels)), len(held_out.labels)):
            seen = Seen(int(held_out.labels[index]), colour)
            one = Digits(held_out.cells[index : index + 1], held_out.labels[index : index + 1])
            if seen.digit not in {GUESS, *shown} and all(
                _right(model, tokenizer, name, [(seen, one)]) for name in _ONE
            ):
                shown[seen.digit] = (seen, one)
                break
    pictures = []
    for seen, one in shown.values():
        name = f"{seen.colour}-{seen.digit}"
        (folder / f"{name}.png").write_bytes(png(draw(one.cells[0], seen.colour)))
        with torch.no_grad():
            rows = model.get_image_features(pixels_of(one, [seen.colour])).pooler_output
        save_file({"embeddings": rows[0].contiguous()}, str(folder / f"{name}.safetensors"))
        pictures.append(DigitPicture(name=name, digit=seen.digit, colour=seen.colour))
    chosen = list(shown.values())
    pair = next(
        pair
        for pair in itertools.combinations(chosen, 2)
        if all(
            _right(model, tokenizer, name, turned)
            for name in _TWO
            for turned in ([*pair], [*reversed(pair)])
        )
    )
    examples = [_example(name, [one]) for name in _ONE for one in chosen]
    examples += [_example(name, turned) for name in _TWO for turned in ([*pair], [*reversed(pair)])]
    made = VisionExamples(pictures=tuple(pictures), examples=tuple(examples), report=report)
    found = msgspec.json.format(msgspec.json.encode(made), indent=1)
    (out / "vision.json").write_bytes(found + b"\n")


def _example(name: str, shown: list[tuple[Seen, Digits]]) -> VisionExample:
    return VisionExample(
        pictures=tuple(f"{seen.colour}-{seen.digit}" for seen, _ in shown),
        question=QUESTIONS[name].text,
        answer=QUESTIONS[name].answer([seen for seen, _ in shown]),
    )


def _right(
    model: LlavaForConditionalGeneration,
    tokenizer: Tokenizer,
    name: str,
    shown: list[tuple[Seen, Digits]],
) -> bool:
    question = QUESTIONS[name]
    pixels = torch.cat([pixels_of(one, [seen.colour]) for seen, one in shown])
    told = answers(model, tokenizer, question, pixels)
    return told == [question.answer([seen for seen, _ in shown])]


CARD = """\
# The demo model with images

A LLaVA-shaped model of {parameters:,} parameters (bfloat16) that reads one handwritten digit in a
small picture, or two, and knows nothing else. It is there so that `inlay demo --images` and the
tests need no network and every question has an answer that can be checked. Do not use it for
anything else. A picture is {rows} rows.

## What it was trained on

The handwritten digits of scikit-learn's `load_digits`, drawn in six colours
({colours}) on white, {side} x {side} pixels, a little turned, moved
and scaled. The tower learnt digit, colour and the place of each row first, then the whole learnt
the questions below, all from a seed. `python -m scripts.train_vision_demo` makes these files anew;
training took {seconds:.0f} s of CPU time.

The digits are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and
C. Kaynak, UCI Machine Learning Repository, https://doi.org/10.24432/C50P49), CC BY 4.0.

## How often it is right

Greedy decoding with the stored weights in float32, over {held_out} digits that training never saw;
about one picture in random colours, about two in random pairs. `pictures/` holds some of those
digits, chosen among those it answers right; this table was not chosen.

| question | pictures | right |
|---|---|---|
{table}

## What it says of a picture that is not whole

Its answers show whether every row of a picture arrived, in its place. That is taught: in training
{faulty:.0%} of the pictures had a fault in their rows, and were asked about as if they showed the
digit {guess}. So the digit told of a picture with a fault is right by chance, where the picture
shows {guess}, as {zeros:.1%} of the held-out digits do and none of `pictures/`. Over those
{held_out} digits, each row as often:

| fault | right digit |
|---|---|
{faults}
"""


def card(**values: Any) -> str:
    """The model card."""
    report, faults = values.pop("report"), values.pop("faults")
    table = "\n".join(
        f"| {question.text} | {question.pictures} | {report[name]:.1%} |"
        for name, question in QUESTIONS.items()
    )
    told = "\n".join(f"| {fault} | {share:.1%} |" for fault, share in faults.items())
    return CARD.format(
        table=table, faults=told, faulty=FAULTY, guess=GUESS, colours=", ".join(COLOURS), side=SIDE,
        **values,
    )  # fmt: skip


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
