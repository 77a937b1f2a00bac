"""How often a drawn picture shows what it was asked for, as the model with images sees it."""

from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from scripts.painter_demo.captions import WORDS, answer
from scripts.painter_demo.painter import GUIDANCE, NAMES, STEPS_DRAWN
from scripts.vision_demo.pictures import SIDE
from scripts.vision_demo.questions import QUESTIONS
from scripts.vision_demo.training import DEVIATION, MEAN, answers
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlavaForConditionalGeneration

_DRAWN = 60
"""Pictures at a time."""


def pictures(painter: StableDiffusionPipeline, wanted: list[tuple[int, str]], seed: int) -> Tensor:
    """Pictures of (digit, colour), each from a seed of its own, float32 [N, 3, SIDE, SIDE], 0 to 1."""
    painter.set_progress_bar_config(disable=True)
    found = []
    for start in range(0, len(wanted), _DRAWN):
        part = wanted[start : start + _DRAWN]
        drawn = painter(
            [answer(*each) for each in part],
            height=SIDE,
            width=SIDE,
            num_inference_steps=STEPS_DRAWN,
            guidance_scale=GUIDANCE,
            generator=[
                torch.Generator().manual_seed(seed + start + index) for index in range(len(part))
            ],
            output_type="np",
        ).images
        found.append(torch.tensor(drawn).permute(0, 3, 1, 2))
    return torch.cat(found)


def measure(
    painter: StableDiffusionPipeline, vision: Path, rounds: int, seed: int
) -> dict[str, float]:
    """Share of pictures in which the digit, the colour, and both are seen.

    Args:
        painter: as it is served.
        vision: directory of the model with images.
        rounds: pictures of each digit in each colour.
        seed: of the first picture.
    """
    wanted = [(digit, name) for _ in range(rounds) for digit in range(len(WORDS)) for name in NAMES]
    model = LlavaForConditionalGeneration.from_pretrained(vision, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(vision / "tokenizer.json"))
    pixels = (pictures(painter, wanted, seed) - MEAN) / DEVIATION
    digits = answers(model, tokenizer, QUESTIONS["digit"], pixels)
    colours = answers(model, tokenizer, QUESTIONS["colour"], pixels)
    right = np.array(
        [
            (told == str(digit), seen == colour)
            for told, seen, (digit, colour) in zip(digits, colours, wanted, strict=True)
        ]
    )
    return {
        "digit": float(right[:, 0].mean()),
        "colour": float(right[:, 1].mean()),
        "both": float(right.all(1).mean()),
    }
