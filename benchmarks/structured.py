"""What a grammar costs.

To compile, for the mask of a token, and in a step of the engine beside the same step without one.

    python -m benchmarks.structured                 a random model of Qwen3-0.6B's shape in bfloat16
    python -m benchmarks.structured --tokenizer DIR
    python -m benchmarks.structured --layers 4 --rounds 2

Without `--tokenizer` a byte-level BPE tokenizer of up to 150,000 tokens is trained on the source of
the installed Python packages, which takes minutes. All times are CPU seconds of the process, the
best of the rounds where there are rounds: in a step the masks count in full, although they are
computed on other threads while the model runs.
"""

import itertools
import json
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks._environment import ensure
from benchmarks._options import parser_of
from benchmarks._random_models import write_model
from benchmarks.engine import Ours, prompt
from inlay.engine.torch.grammar.grammars import Grammars
from inlay.messages.request import Grammar
from inlay.render.tokenizer import load_tokenizer

VOCAB_SIZE = 151936
EOS_ID = 0
_TYPES = ("string", "integer", "number", "boolean")


def train(directory: Path, files: int = 4000, vocab_size: int = 150_000) -> None:
    """Write a tokenizer of `vocab_size` tokens, trained on so many source files."""
    sources = Path(sysconfig.get_paths()["purelib"]).rglob("*.py")

    def texts() -> Iterator[str]:
        for path in itertools.islice(sources, files):
            yield path.read_text(encoding="utf-8", errors="ignore")[:200_000]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))


def schema_of(draw: random.Random, fields: int, depth: int) -> dict[str, Any]:
    """An object with so many fields a level, some of which are objects, lists and enums."""
    properties: dict[str, Any] = {}
    for index in range(fields):
        kind = index % 5
        if kind == 3 and depth:
            value: dict[str, Any] = schema_of(draw, fields, depth - 1)
        elif kind == 4:
            value = {"type": "array", "items": {"type": draw.choice(_TYPES)}, "maxItems": 4}
        elif kind == 2:
            value = {
                "enum": [f"{draw.choice('abcdefgh')}-{draw.randrange(1000)}" for _ in range(6)]
            }
        else:
            value = {"type": draw.choice(_TYPES)}
        properties[f"{draw.choice(('name', 'count', 'place', 'state'))}_{index}"] = value
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def instance_of(schema: dict[str, Any], draw: random.Random) -> Any:
    """A value that `schema` allows."""
    if "enum" in schema:
        return draw.choice(schema["enum"])
    if schema["type"] == "object":
        return {name: instance_of(part, draw) for name, part in schema["properties"].items()}
    if schema["type"] == "array":
        return [instance_of(schema["items"], draw) for _ in range(3)]
    values = {"string": "a lantern in the harbour", "integer": 42, "number": 2.5, "boolean": True}
    return values[schema["type"]]


def measure_grammar(
    name: str, schema: dict[str, Any], grammars: Grammars, tokenizer: Tokenizer
) -> None:
    source = json.dumps(schema)
    times = []
    for spaces in range(5):  # each another source, so that none is found compiled
        begun = time.process_time()
        state = grammars.start(Grammar("json_schema", source + " " * spaces), (), ()).state.result()
        times.append(time.process_time() - begun)
    text = json.dumps(instance_of(schema, random.Random(2)))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    masks = []
    for length in range(len(ids) + 1):
        begun = time.process_time()
        state.read(ids[:length])
        state.mask()
        masks.append(time.process_time() - begun)
    masks.sort()
    sys.stdout.write(
        f"{name:8}{len(source) / 1e3:>9.1f} KB   compiled {min(times) * 1e3:>7.1f} ms"
        f"   mask of a token: median {statistics.median(masks) * 1e3:.3f} ms, mean {statistics.mean(masks) * 1e3:.3f},"
        f" worst of {len(masks)} {masks[-1] * 1e3:.2f}\n"
    )


def measure_steps(
    ours: Ours,
    schema: dict[str, Any],
    grammars: Grammars,
    batches: list[int],
    steps: int,
    rounds: int,
) -> None:
    """Decode with and without a grammar that has no end within the steps, in turns."""
    endless = {"type": "array", "items": schema, "minItems": 1000}
    grammar = Grammar("json_schema", json.dumps(endless))
    for batch in batches:
        prompts = [prompt(64, index) for index in range(batch)]
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds):
            for bound in times:
                ours.bind(grammar if bound else None, grammars)
                times[bound].append(ours.decode(prompts, steps))
        free, held = min(times[False]), min(times[True])
        sys.stdout.write(
            f"decode {batch:>2} at 64   without {free * 1e3:>7.1f} ms   with {held * 1e3:>7.1f} ms   "
            f"{(held - free) / batch * 1e3:+.2f} ms a sequence   {held / free:.3f}x\n"
        )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokenizer", type=Path, help="A directory with a tokenizer.json.")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    ensure("benchmarks.structured")
    torch.set_num_threads(1)
    draw = random.Random(1)
    schemas = {
        "small": schema_of(draw, 3, 0),
        "medium": schema_of(draw, 14, 1),
        "large": schema_of(draw, 80, 1),
    }
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if options.tokenizer is None:
            train(directory)
        path = options.tokenizer or directory
        tokenizer = load_tokenizer(path).tokenizer
        grammars = Grammars(path, VOCAB_SIZE, (EOS_ID,))
        grammars.start(Grammar("json_object", ""), (), ()).state.result()
        sys.stdout.write(f"vocabulary of {tokenizer.get_vocab_size()}\n")
        for kind, schema in schemas.items():
            measure_grammar(kind, schema, grammars, tokenizer)
        write_model(directory, options.layers)
        ours = Ours(directory, 1, 32, 32 * (64 + options.steps + 32))
        measure_steps(ours, schemas["medium"], grammars, [1, 8, 32], options.steps, options.rounds)
        grammars.close()


if __name__ == "__main__":
    main()
