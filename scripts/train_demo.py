"""Make every file of `inlay.demo` anew: `python -m scripts.train_demo`.

A quarter of an hour or so on two cores.
"""

import argparse
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from scripts.demo_training.corpus import Corpus
from scripts.demo_training.evaluation import evaluate_model
from scripts.demo_training.package import write_model, write_soft_prompt
from scripts.demo_training.showcase import Showcase, measure_soft_prompt, write_card, write_examples
from scripts.demo_training.soft_prompt import split_inputs, tune
from scripts.demo_training.text_prompts import text_prompts
from scripts.demo_training.tokenizer import train_tokenizer
from scripts.demo_training.training import round_to_bfloat16, train_model
from scripts.demo_training.world import build_world
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

import inlay.demo

LOGGER = logging.getLogger(__name__)

WORLD_SEED = 7
TOKENIZER_SEED, CORPUS_SEED, EVALUATION_SEED, SHOWCASE_SEED = 1, 2, 3, 4
TOKENIZER_DOCUMENTS = 40_000
STEPS = 2200
LAST_STEPS, LAST_SEED, LAST_RATE = 160, 1, 0.2
"""A last phase at a lower learning rate, over documents of its own."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, tune, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path(inlay.demo.__file__).parent, help="folder to write to"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of the model")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights, order and soft prompt"
    )
    parser.add_argument(
        "--keep-model",
        action="store_true",
        help="use the model that is there; tune and measure only",
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    torch.use_deterministic_algorithms(True)

    out: Path = options.out
    began = time.monotonic()
    world = build_world(WORLD_SEED)
    if options.keep_model:
        tokenizer = Tokenizer.from_file(str(out / "model" / "tokenizer.json"))
        model = round_to_bfloat16(
            Qwen3ForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
        )
    else:
        drawn = Corpus(world, TOKENIZER_SEED)
        tokenizer = train_tokenizer(
            "".join(piece.text for piece in drawn.document()) for _ in range(TOKENIZER_DOCUMENTS)
        )
        model = train_model(Corpus(world, CORPUS_SEED), tokenizer, options.steps, options.seed)
        last = Corpus(world, CORPUS_SEED + LAST_SEED)
        model = train_model(
            last, tokenizer, LAST_STEPS, options.seed + LAST_SEED, start=model, rate=LAST_RATE
        )
        write_model(model, tokenizer, out / "model")

    report = evaluate_model(model, tokenizer, world, EVALUATION_SEED)
    for name, share in report.items():
        LOGGER.info("%-36s %.3f", name, share)
    split = split_inputs(world, options.seed)
    rows = tune(model, tokenizer, split, options.seed)
    write_soft_prompt(rows, out / "soft_prompt.safetensors", out / "soft_prompt_peft", "inlay-demo")
    task = measure_soft_prompt(
        model, tokenizer, rows, split, text_prompts(split.tuning, options.seed)
    )
    LOGGER.info(
        "soft prompt %.3f, best text prompt %.3f", task.accuracy, task.text_prompts[0].accuracy
    )

    examples = Showcase(model, tokenizer, world, SHOWCASE_SEED).examples(task, report)
    write_examples(examples, out / "tasks.json")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    write_card(examples, parameters, (options.steps, LAST_STEPS), out / "README.md")
    LOGGER.info("done after %.0f s", time.monotonic() - began)


if __name__ == "__main__":
    main()
