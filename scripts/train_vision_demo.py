"""Make the model with images of `inlay.demo` anew: `python -m scripts.train_vision_demo`.

Some minutes on one core. Needs the dependency group `train`.
"""

import argparse
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from scripts.vision_demo.faults import GUESS, ROWS
from scripts.vision_demo.package import card, write_examples, write_model
from scripts.vision_demo.pictures import load_digits, write_sheet
from scripts.vision_demo.questions import train_tokenizer
from scripts.vision_demo.training import (
    Pictures,
    build_model,
    measure,
    measure_faults,
    train_model,
    train_tower,
)

import inlay.demo

LOGGER = logging.getLogger(__name__)

TOWER_STEPS, STEPS = 900, 2000
EVALUATION_SEED, SHOWCASE_SEED = 1, 2
SHEET = Path(__file__).resolve().parents[1] / "tests" / "demo" / "held_out.png"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path(inlay.demo.__file__).parent, help="folder to write to"
    )
    parser.add_argument("--sheet", type=Path, default=SHEET, help="file for held-out digits")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and pictures")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(options.seed)

    began = time.process_time()
    digits, held_out = load_digits()
    tokenizer = train_tokenizer()
    model = build_model(tokenizer)
    train_tower(model, Pictures(digits, options.seed), TOWER_STEPS)
    train_model(model, tokenizer, Pictures(digits, options.seed + 1), STEPS, options.seed)
    seconds = time.process_time() - began

    out: Path = options.out
    directory = out / "vision"
    write_model(model, tokenizer, directory)
    report = measure(model, tokenizer, held_out, EVALUATION_SEED)
    for name, share in report.items():
        LOGGER.info("%-10s %.3f", name, share)
    faults = measure_faults(model, tokenizer, held_out, EVALUATION_SEED)
    for name, share in faults.items():
        LOGGER.info("%-33s %.3f", name, share)
    write_examples(model, tokenizer, held_out, report, out, SHOWCASE_SEED)
    write_sheet(held_out, options.sheet)
    text = card(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        rows=ROWS,
        seconds=seconds,
        held_out=len(held_out.labels),
        zeros=float((held_out.labels == GUESS).mean()),
        report=report,
        faults=faults,
    )
    (directory / "README.md").write_text(text, encoding="utf-8")
    LOGGER.info("done after %.0f CPU s", time.process_time() - began)


if __name__ == "__main__":
    main()
