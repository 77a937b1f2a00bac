"""Make the pipeline of `inlay.demo` that draws anew: `python -m scripts.train_painter_demo`.

Some minutes on one core. Needs the dependency group `train` and the extra `diffusers`.
"""

import argparse
import logging
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from scripts.painter_demo import writer as writing
from scripts.painter_demo.measure import measure
from scripts.painter_demo.package import card, write_examples, write_pipeline
from scripts.painter_demo.painter import (
    build_painter,
    round_weights,
    train_autoencoder,
    train_denoiser,
)
from scripts.vision_demo.pictures import load_digits
from scripts.vision_demo.training import Pictures

import inlay.demo

LOGGER = logging.getLogger(__name__)

WRITER_STEPS, AUTOENCODER_STEPS, STEPS = 250, 700, 1600
EVALUATION_SEED, SHOWCASE_SEED = 1, 2
ASKED, ROUNDS = 300, 5


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    home = Path(inlay.demo.__file__).parent
    parser.add_argument("--out", type=Path, default=home / "pipeline", help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and pictures")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

    began = time.process_time()
    digits, _ = load_digits()
    torch.manual_seed(options.seed)
    painter = build_painter()
    train_autoencoder(painter.vae, Pictures(digits, options.seed), AUTOENCODER_STEPS)
    train_denoiser(painter, Pictures(digits, options.seed + 1), STEPS, options.seed)
    torch.manual_seed(options.seed)
    tokenizer = writing.build_tokenizer(options.seed)
    writer = writing.build_writer(tokenizer)
    writing.train_writer(writer, tokenizer, WRITER_STEPS, options.seed)
    round_weights(painter)
    seconds = time.process_time() - began

    out: Path = options.out
    write_pipeline(writer, tokenizer, painter, out)
    rng = random.Random(EVALUATION_SEED)
    pairs = [writing.draw(rng) for _ in range(ASKED)]
    written = sum(writing.ask(writer, tokenizer, asked) == told for asked, told in pairs) / ASKED
    report = measure(painter, home / "vision", ROUNDS, EVALUATION_SEED)
    report = {"written": written, **report}
    for name, share in report.items():
        LOGGER.info("%-10s %.3f", name, share)
    write_examples(writer, tokenizer, out / "examples.json", report, SHOWCASE_SEED)
    text = card(
        writer=sum(parameter.numel() for parameter in writer.parameters()),
        painter=sum(
            parameter.numel()
            for part in (painter.text_encoder, painter.unet, painter.vae)
            for parameter in part.parameters()
        ),
        question=pairs[0][0],
        answer=pairs[0][1],
        asked=ASKED,
        drawn=ROUNDS * 60,
        seconds=seconds,
        vision=inlay.demo.vision_examples().report["digit"],
        **report,
    )
    (out / "README.md").write_text(text, encoding="utf-8")
    LOGGER.info("done after %.0f CPU s", time.process_time() - began)


if __name__ == "__main__":
    main()
