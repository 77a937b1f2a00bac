"""Starts of right models that the self-check refuses: `python -m benchmarks.false_alarms [NAME ...]`.

Each model is started 20 times with `--self-check strict`, each time with other prompts, and
lifelike ones with other weights; and once more from what that start kept. NAME is a group: text,
media, quantised, rounded (`--quantization`), embedders, rerankers, published (`make test-published`
fetches these).
"""

import logging
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import torch
from scripts.published import CHECKPOINTS, directory_of, file_of
from tests.embedding_models import EMBEDDING_MODELS, tiny_embedding, tiny_scoring
from tests.engine.torch.test_vision import CASES
from tests.engine.torch.vision_reference import directory_of as directory_with_media
from tests.lifelike import LOUD, lifelike, text
from tests.models import FAMILIES, models_root
from tests.numbers.test_vectors import RERANKERS
from tests.quantised_models import FORMS, write
from tokenizers import Tokenizer

from inlay.base.errors import EngineError
from inlay.engine import references
from inlay.engine.embed import self_check as embed_check
from inlay.engine.embed.encoder import Encoder
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.self_check import reference
from inlay.engine.torch.self_check.prompts import COUNT, ROWS, CheckPrompt, check_prompts
from inlay.messages.card import SelfCheck
from inlay.tensors.checkpoint import checkpoint_of

STARTS = 20
GROUPS = ("text", "media", "quantised", "rounded", "embedders", "rerankers", "published")
PAGE = Path(__file__).parents[1] / "docs" / "models.md"


class Model(NamedTuple):
    """A model that is right.

    Attributes:
        name: as it is printed.
        directory: by seed.
        task: of the engine.
        max_model_len: that it generates with.
        options: further settings of the engine.
    """

    name: str
    directory: Callable[[int], Path]
    task: str = "generate"
    max_model_len: int = 4096
    options: Mapping[str, str] = MappingProxyType({})


def group(name: str) -> Iterator[Model]:
    if name == "text":
        for family in FAMILIES:
            yield Model(family, partial(text, family))
            if family in LOUD:
                yield Model(f"{family}, loud", partial(text, family, loud=True))
    elif name == "media":
        # Of its videos a model is the one of its images.
        for case in dict.fromkeys(name.partition("+")[0] for name in CASES):
            yield Model(case, partial(lifelike, directory_with_media(case)), max_model_len=512)
    elif name == "quantised":
        for form in FORMS:
            directory, _ = write(form, lively=True)
            yield Model(form, partial(_same, directory), max_model_len=512)
    elif name == "rounded":
        yield from _rounded()
    elif name == "embedders":
        yield from (
            Model(each, partial(lifelike, tiny_embedding(each)), "embed")
            for each in EMBEDDING_MODELS
        )
    elif name == "rerankers":
        yield from (
            Model(each, partial(lifelike, tiny_scoring(each, 3)), "score") for each in RERANKERS
        )
    elif name == "published":
        yield from _published()


def _rounded() -> Iterator[Model]:
    families, forms = ("llama3", "qwen2", "gemma3_text"), ("int8", "q4_k")
    for family, form, dtype in product(families, forms, ("bfloat16", "float32")):
        options = {"quantization": form, "dtype": dtype}
        yield Model(f"{family} {form} {dtype}", partial(text, family), options=options)


def _published() -> Iterator[Model]:
    for name, checkpoint in CHECKPOINTS.items():
        if checkpoint.form != "gguf":
            yield Model(name, partial(_same, directory_of(name)), "embed")
            continue
        # What its file gives without blocks is the same, to the bit.
        yield Model(name, partial(_same, directory_of(name)))
        yield Model(f"{name}, GGUF", partial(_same, file_of(name)))


def _same(directory: Path, _: int) -> Path:
    return directory


def drawn(
    seed: int, directory: Path, vocab_size: int, max_model_len: int, *, draw: int = 0, **named: Any
) -> tuple[CheckPrompt, ...]:
    """The check's prompts with other ids: random ones, and some of a page in place of its text."""
    generator = random.Random(seed + 1000 * draw)
    form = checkpoint_of(directory).file("tokenizer.json")
    page = []
    if form is not None:
        page = Tokenizer.from_buffer(form).encode(PAGE.read_text()[:20_000]).ids
    found = []
    for prompt in check_prompts(directory, vocab_size, max_model_len, **named):
        ids, others = ([generator.randrange(vocab_size) for _ in range(COUNT)] for _ in range(2))
        if prompt.kind == "text" and page:
            start = generator.randrange(len(page) - COUNT)
            if max(page[start : start + COUNT]) < vocab_size:
                ids = page[start : start + COUNT]
        others = others[ROWS] if prompt.others else []
        found.append(prompt._replace(ids=tuple(ids), others=tuple(others)))
    return tuple(found)


def start(model: Model, directory: Path) -> SelfCheck:
    settings = EngineSettings.of(**{
            "model": str(directory), "device": "cpu", "task": model.task, "self_check": "strict",
            **({"max_model_len": model.max_model_len} if model.task == "generate" else {}),
            **model.options,
        }
    )  # fmt: skip
    kind = CausalModel if model.task == "generate" else Encoder
    found = kind.load(settings).self_check
    assert found is not None
    assert found.result == "passed", found
    return found


def starts(model: Model) -> None:
    """Start a model as often as is said, and print the largest distances."""
    begun, failed = time.monotonic(), 0
    answers, layers = [0.0], [0.0]
    for seed in range(STARTS):
        directory = model.directory(seed)
        with (
            tempfile.TemporaryDirectory() as kept,
            mock.patch.object(references, "_path", partial(Path, kept)),
            mock.patch.object(reference, "check_prompts", partial(drawn, seed)),
            mock.patch.object(embed_check, "check_prompts", partial(drawn, seed)),
        ):
            try:
                for found in (start(model, directory), start(model, directory)):
                    answers.append(found.distance)
                    layers += found.layers
            except EngineError as error:
                failed += 1
                print(f"{model.name}, seed {seed}: {error}", flush=True)
        # Those of other options are asked for again.
        if (
            models_root() in directory.parents
            and "lifelike" in directory.parts
            and not model.options
        ):
            shutil.rmtree(directory)
            # Another group writes it again.
            text.cache_clear()
            lifelike.cache_clear()
    print(
        f"{model.name:40} {STARTS - failed:3} of {STARTS}  answers {max(answers):5.2f}  "
        f"layers {max(layers):5.2f}  {time.monotonic() - begun:5.0f} s",
        flush=True,
    )


def main(names: list[str]) -> int:
    logging.disable(logging.INFO)
    torch.set_grad_enabled(False)
    for name in names or GROUPS:
        print(f"-- {name}", flush=True)
        for model in group(name):
            starts(model)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
