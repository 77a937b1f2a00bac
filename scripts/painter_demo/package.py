"""Writing the files of the pipeline that draws."""

import json
import random
import textwrap
from pathlib import Path

import msgspec
import torch
from diffusers import StableDiffusionPipeline
from scripts.demo_training.package import write_model
from scripts.painter_demo.captions import answer, question
from scripts.painter_demo.painter import GUIDANCE, NAMES, STEPS_DRAWN
from scripts.painter_demo.writer import ask
from scripts.vision_demo.pictures import COLOURS
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

_EXAMPLES = 6

CARD = """\
# The demo pipeline that draws

Two small models in a row that know nothing else. A Qwen3-shaped writer of {writer:,} parameters
answers a question such as "{question}" with a caption, "{answer}". A painter of {painter:,}
parameters in the parts of Stable Diffusion (CLIP text encoder, UNet, autoencoder; all bfloat16)
draws that caption, 16 x 16 pixels. They are there so that `inlay demo` and the tests need no
network, and what is drawn can be checked: the model with images in `../vision` is asked what it
sees. Do not use them for anything else.

## What they were trained on

The painter: the handwritten digits of scikit-learn's `load_digits`, those that `../vision` was
trained on, in six colours ({colours}), with captions of three forms. The writer:
questions made of sums and of things of a colour. All from a seed;
`python -m scripts.train_painter_demo` makes these files anew; training took {seconds:.0f} s of CPU
time.

The digits are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and
C. Kaynak, UCI Machine Learning Repository, https://doi.org/10.24432/C50P49), CC BY 4.0.

## How often they are right

The writer, on {asked} questions drawn afresh, greedy: {written:.1%}. The painter, on {drawn}
captions with {steps} steps and a guidance of {guidance:g}, stored weights in float32, as the model
with images sees it: digit {digit:.1%}, colour {colour:.1%}, both {both:.1%}. That model itself is
right on {vision:.1%} of held-out digits.
"""


GRAPH = """\
# A writer answers a question with a caption; a painter draws it.
name: inlay-demo
stages:
  writer: {kind: generate, model: writer}
  painter: {kind: image, model: painter}
edges:
  - writer.text -> painter.prompt
inputs: {prompt: writer.prompt}
outputs: {text: writer.text, image: painter.image, preview: painter.preview}
"""


def write_painter(painter: StableDiffusionPipeline, directory: Path) -> None:
    """Write a directory as `diffusers` reads it, weights in bfloat16."""
    painter.to(torch.bfloat16).save_pretrained(directory)
    painter.to(torch.float32)
    for file in directory.rglob("*.json"):
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.pop("_name_or_path", None) is not None:
            _write_json(file, found)


def write_pipeline(
    writer: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    painter: StableDiffusionPipeline,
    directory: Path,
) -> None:
    """Write both models, in folders `writer` and `painter`."""
    write_model(writer, tokenizer, directory / "writer")
    write_painter(painter, directory / "painter")
    (directory / "graph.yaml").write_text(GRAPH, encoding="utf-8")


def write_examples(
    writer: Qwen3ForCausalLM, tokenizer: Tokenizer, path: Path, report: dict[str, float], seed: int
) -> None:
    """Write questions, one for each colour, that the writer answers right, and the figures."""
    rng = random.Random(seed)
    examples: list[dict[str, object]] = []
    for colour in rng.sample(NAMES, _EXAMPLES):
        digit = rng.randrange(10)
        asked = question(digit, colour, rng)
        told = ask(writer, tokenizer, asked)
        if told != answer(digit, colour):
            raise ValueError(f"the writer answers {asked!r} with {told!r}")
        examples.append({"question": asked, "answer": told, "digit": digit, "colour": colour})
    made = {"examples": examples, "steps": STEPS_DRAWN, "guidance": GUIDANCE, "report": report}
    path.write_bytes(msgspec.json.format(json.dumps(made).encode(), indent=1) + b"\n")


def card(**values: object) -> str:
    """The model card, at 100 columns."""
    text = CARD.format(colours=", ".join(COLOURS), steps=STEPS_DRAWN, guidance=GUIDANCE, **values)
    paragraphs = [
        textwrap.fill(" ".join(one.split()), 100, break_on_hyphens=False)
        for one in text.strip().split("\n\n")
    ]
    return "\n\n".join(paragraphs) + "\n"


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
