"""Speculative decoding: requests with it beside the same without.

    python -m benchmarks.speculation                by n-gram look-up and by grammars; a random
                                                    model of Qwen3-0.6B's shape in bfloat16
    python -m benchmarks.speculation --layers 4 --rounds 2 --tokenizer DIR --only json
    python -m benchmarks.speculation --draft-layers 2
                                                    by a draft model
    python -m benchmarks.speculation --neighbours --layers 4
    python -m benchmarks.speculation --neighbours --model src/inlay/demo/model
                                                    what drafts of a client cost another

A random model has nothing to say, so its masks hold it to texts: the edited file, the summary, the
JSON. How many drafts are accepted is then a property of the texts. Drafts come from what the texts'
own grammars force (JSON of a schema), or from n-grams, never from these masks. Texts of shuffled
words have n-grams that are not continued as before: what look-up costs where it does not pay. With
and without take turns step by step, so that both meet the same machine; times are CPU seconds of
the process from the first token to the last. Without `--tokenizer` one of 32,000 tokens is trained on installed Python packages.

With `--neighbours`, four sequences of a client decode random words, which nothing drafts, beside
those of one whose drafts are all right (a bias repeats a token), half of them (two tokens by
chance), none (a text that is never what look-up says), or forced by a grammar. Who ends is
followed by the same request. Printed are the times of a step, which are those between tokens of
the four.

A draft model here is the first layers of the served one, with a vocabulary of 32,000. How often it
guesses right is set by how little the layers behind them add (`--share`): this shows what a given
acceptance is worth, not what acceptance a trained pair has.
"""

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from llguidance import LLMatcher
from safetensors.torch import load_file, save_file

from benchmarks._environment import ensure
from benchmarks._options import parser_of
from benchmarks._random_models import write_model
from benchmarks.engine import Ours
from benchmarks.structured import EOS_ID, instance_of, schema_of, train
from inlay.engine.grammar.matchers import matcher_of, tokenizer_of
from inlay.engine.speculation import SpeculativeConfig
from inlay.engine.torch.grammar.state import GrammarState, Mask
from inlay.engine.torch.speculation.ngram import lookup, text_of
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Grammar, Request, Sampling
from inlay.render.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
CONFIG = SpeculativeConfig(method="ngram")
GUIDED = SpeculativeConfig(method="grammar")


def edit() -> tuple[str, str]:
    """Return a file with an instruction, and the file with a class renamed."""
    source = (ROOT / "src" / "inlay" / "fair_queue.py").read_text()[:3500]
    asked = f"{source}\n\nRename the class FairQueue to TurnQueue and write the file again.\n\n"
    return asked, source.replace("FairQueue", "TurnQueue")


def summary() -> tuple[str, str]:
    """Return a page with an instruction, and a summary in words of the page and others."""
    page = (ROOT / "docs" / "architecture.md").read_text()[:6000]
    told = (
        "Text, token ids, embeddings and stored prompts all become one `Prompt`, so nothing behind "
        "the frontend knows where a prompt came from. A token is identified by its id, an "
        "embedding vector by a digest of its bytes, an image by a digest of its file. A prompt is "
        "cut into blocks whose digests cover all before them; the prefix cache and the router find "
        "blocks by these digests, so that prompts of text and mixed prompts share a cached "
        "beginning. A `Request` is a task with its parameters, an `Output` is a piece of the "
        "answer, and a `ModelCard` is what a worker announces. All tasks go the same way, with the "
        "same queue, retries, deadlines and counters."
    )
    return f"{page}\n\nSummarise this page in a paragraph.\n\n", told


class Told(GrammarState):
    """A grammar whose masks hold an output to one text that it allows."""

    def __init__(self, matcher: LLMatcher, grammar: Grammar, ids: list[int], size: int) -> None:
        super().__init__(matcher, grammar, (), size)
        self._ids = ids

    def mask(self) -> Mask | None:
        """As `GrammarState`, at the cost of its mask."""
        found = super().mask()
        if found is not None:
            id_ = self._ids[min(self._seen, len(self._ids) - 1)]
            found[:] = 0
            found[id_ >> 5] = np.uint32(1 << (id_ & 31))
        return found


@dataclass(frozen=True)
class Load:
    """Requests that decode together.

    Attributes:
        name: of the load.
        texts: prompt, schema (None for any text) and answer of each.
        method: of speculation.
    """

    name: str
    texts: list[tuple[str, dict[str, Any] | None, str]]
    method: Literal["ngram", "grammar"]


def loads() -> Iterator[Load]:
    """Yield what is measured."""
    for name, (asked, answer) in {"code edit": edit(), "summary": summary()}.items():
        yield Load(name, [(asked, None, answer)], "ngram")
    draw = random.Random(3)
    page, _ = summary()
    words = page.split()
    for batch in (1, 8, 32):
        mixed = [" ".join(draw.choices(words, k=60)) for _ in range(batch)]
        yield Load(f"shuffled {batch}", [(page[:2000], None, text) for text in mixed], "ngram")
    for batch in (1, 8):
        schemas = [schema_of(draw, 14, 1) for _ in range(batch)]
        texts = [json.dumps(instance_of(schema, draw)) for schema in schemas]
        yield Load(
            f"json {batch}",
            [(page[:1000], *of) for of in zip(schemas, texts, strict=True)],
            "grammar",
        )


class Bench:
    """Engines, with and without speculation, and the tokenizer of the texts."""

    def __init__(self, directory: Path, tokens: Path) -> None:
        self._tokenizer = load_tokenizer(tokens).tokenizer
        self._matching = tokenizer_of(tokens, (EOS_ID,))
        # Copies of the weights are not read equally fast: up to 1.15x between two engines.
        model = Ours(directory, 1, 32, 1024).model
        self.engines = {
            kind: Ours(directory, 1, 32, 32 * 1024, speculation=config, model=model)
            for kind, config in {"plain": None, "ngram": CONFIG, "grammar": GUIDED}.items()
        }

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def begin(self, engine: Ours, load: Load) -> None:
        """Have an engine read the prompts of a load, until each request has a token."""
        for place, (asked, schema, answer) in enumerate(load.texts):
            source = (
                LLMatcher.grammar_from_regex("(?s:.*)")
                if schema is None
                else LLMatcher.grammar_from_json_schema(json.dumps(schema))
            )
            grammar = Grammar("regex" if schema is None else "json_schema", source)
            ids = self._ids(answer)
            matcher = matcher_of(self._matching, source)
            state = Told(matcher, grammar, ids, self._matching.vocab_size)
            sampling = Sampling(
                max_tokens=len(ids), temperature=0.0, ignore_eos=True, grammar=grammar
            )
            prompt = Prompt.of(Tokens(self._ids(asked)))
            request = Request(id=str(place), prompts=(prompt,), params=sampling)
            engine.core.admit(request, grammar=state)
        begun: set[str] = set()
        while len(begun) < len(load.texts):
            begun.update(output.request_id for output in engine.core.step() if output.token_ids)

    def report(self, load: Load, rounds: int) -> None:
        """Print the gain of a load, over all rounds."""
        kinds = ("plain", load.method)
        before = {kind: self.engines[kind].core.stats() for kind in kinds}
        seconds, tokens = dict.fromkeys(kinds, 0.0), Counter[str]()
        for _ in range(rounds):
            for kind in kinds:
                self.begin(self.engines[kind], load)
            told = {kind: self.engines[kind].core.stats().generated_tokens for kind in kinds}
            going = list(kinds)
            while going:
                for kind in going:
                    seconds[kind] += step(self.engines[kind])
                going = [kind for kind in going if len(self.engines[kind].core)]
            for kind in kinds:
                tokens[kind] += self.engines[kind].core.stats().generated_tokens - told[kind]
        now = self.engines[load.method].core.stats()
        drafted = now.num_draft_tokens - before[load.method].num_draft_tokens
        accepted = now.num_accepted_tokens - before[load.method].num_accepted_tokens
        plain, other = (tokens[kind] / seconds[kind] for kind in kinds)
        print(
            f"{load.name:12} {load.method:8} {tokens['plain'] // rounds:6} {plain:8.1f} "
            f"{other:8.1f} tokens/s {other / plain:5.3f}x  {drafted / rounds:6.0f} drafted, "
            f"{accepted / max(1, drafted):4.0%} accepted",
            flush=True,
        )


def step(engine: Ours) -> float:
    """Return the CPU seconds of a step, and of the masks that it leaves to be computed."""
    start = time.process_time()
    engine.core.step()
    time.sleep(0.005)
    return time.process_time() - start


NEIGHBOURS = (
    ("nothing", 0), ("right", 1), ("right", 4), ("right", 28), ("half", 8),
    ("wrong", 8), ("wrong", 28), ("forced", 1), ("forced", 8), ("forced", 28),
)  # fmt: skip
"""What the drafts of the other client are, and of how many sequences."""

LENGTH = 600
"""Tokens of its requests."""


class Neighbours:
    """Two clients in engines with and without drafts."""

    def __init__(self, directory: Path, tokens: Path) -> None:
        model = Ours(directory, 1, 32, 1024).model
        self._matching = tokenizer_of(tokens, (EOS_ID,))
        self._engines = {
            kind: Ours(directory, 1, 32, 40 * 1024, speculation=config, model=model)
            for kind, config in {"plain": None, "drafts": CONFIG}.items()
        }
        self._admitted = 0

    def _admit(self, engine: Ours, kind: str, number: int) -> None:
        draw = random.Random(number)
        ids = [draw.randrange(100, 3000) for _ in range(16)]
        options: dict[str, Any] = {"max_tokens": LENGTH, "temperature": 0.0}
        state = None
        if kind == "words":
            options |= {"temperature": 1.0, "seed": number}
        elif kind == "right":
            options["logit_bias"] = {11: 1000.0}
        elif kind == "half":
            bias = {11: 1000.0, 12: 1000.0}
            options |= {"temperature": 1.0, "seed": number, "logit_bias": bias}
        else:
            forced = json.dumps({"const": "a lantern in the harbour at night " * 20})
            source = (
                LLMatcher.grammar_from_json_schema(forced)
                if kind == "forced"
                else LLMatcher.grammar_from_regex("(?s:.*)")
            )
            grammar = Grammar("json_schema" if kind == "forced" else "regex", source)
            matcher, size = matcher_of(self._matching, source), self._matching.vocab_size
            state = GrammarState(matcher, grammar, (), size)
            if kind == "wrong":
                ids = unforeseen(LENGTH + 3, draw)
                state = Told(matcher, grammar, ids[3:], size)
                ids = ids[:3]
            options["grammar"] = grammar
        self._admitted += 1
        client = "words" if kind == "words" else "drafts"
        request = Request(
            id=f"{kind} {number} {self._admitted}",
            prompts=(Prompt.of(Tokens(ids)),),
            params=Sampling(ignore_eos=True, **options),
            client=client,
        )
        engine.core.admit(request, grammar=state)

    def report(self, kind: str, count: int, steps: int) -> None:
        """Print the times of steps, and tokens of the client that drafts."""
        for engine in self._engines.values():
            for number in range(4):
                self._admit(engine, "words", 1000 + number)
            for number in range(count):
                self._admit(engine, kind, number)
            for _ in range(3):
                step(engine)
        cpu: dict[str, list[float]] = {each: [] for each in self._engines}
        wall: dict[str, list[float]] = {each: [] for each in self._engines}
        tokens = Counter[str]()
        for _ in range(steps):
            for each, engine in self._engines.items():
                began = time.perf_counter(), time.process_time()
                outputs = engine.core.step()
                wall[each].append(time.perf_counter() - began[0])
                # Masks that the step leaves to be computed count.
                time.sleep(0.005)
                cpu[each].append(time.process_time() - began[1])
                for output in outputs:
                    of, name, _ = output.request_id.split()
                    tokens[each] += len(output.token_ids) * (of != "words")
                    if output.finish_reason is not None:
                        self._admit(engine, of, int(name))
        line = f"{kind:8} {count:3}"
        for each, engine in self._engines.items():
            p50, p99 = np.percentile(wall[each], [50, 99]) * 1e3
            line += f"  {each} {p50:7.1f} {p99:7.1f} ms, {tokens[each] / steps:5.1f} tokens a step"
            engine.core.abort_all()
        p50s = [float(np.median(wall[each])) for each in self._engines]
        means = [float(np.mean(cpu[each])) for each in self._engines]
        print(f"{line}  p50 {p50s[1] / p50s[0]:.2f}x, CPU {means[1] / means[0]:.2f}x", flush=True)


def unforeseen(count: int, draw: random.Random) -> list[int]:
    """Return ids of which none is what look-up says."""
    ids = [20, 21, 22]
    while len(ids) < count:
        said = lookup(text_of(ids), 1, CONFIG.prompt_lookup_min, CONFIG.prompt_lookup_max)
        ids.append(draw.choice([id_ for id_ in (20, 21, 22) if id_ not in said]))
    return ids


def measure(engine: Ours, prompt: list[int], count: int) -> float:
    """Return the CPU seconds of `count` tokens after the first."""
    engine.admit(prompt, count)
    while not any(output.token_ids for output in engine.core.step()):
        pass
    start = time.process_time()
    while len(engine.core):
        engine.core.step()
    return time.process_time() - start


def write_pair(directory: Path, layers: int, draft_layers: int, share: float) -> tuple[Path, Path]:
    """Write a model and the draft model that its first layers are; return both directories.

    What layers behind these add is `share` of what they would.
    """
    served, draft = directory / "served", directory / "draft"
    write_model(served, layers, vocab_size=32_000)
    (file,) = served.glob("*.safetensors")
    tensors = load_file(file)
    kept = {}
    for name, tensor in tensors.items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
        if layer < draft_layers:
            kept[name] = tensor
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= share
    save_file(tensors, file, {"format": "pt"})
    draft.mkdir()
    save_file(kept, draft / file.name, {"format": "pt"})
    config = json.loads((served / "config.json").read_text())
    config["num_hidden_layers"] = draft_layers
    config["layer_types"] = config["layer_types"][:draft_layers]
    (draft / "config.json").write_text(json.dumps(config))
    return served, draft


def report_draft_model(options: argparse.Namespace, directory: Path) -> None:
    """Print the gain by a draft model for one request of 256 tokens."""
    served, draft = write_pair(directory, options.layers, options.draft_layers, options.share)
    setting = SpeculativeConfig(model=str(draft), num_speculative_tokens=options.most)
    engines = {
        "plain": Ours(served, 1, 4, 8192),
        "draft": Ours(served, 1, 4, 8192, speculation=setting),
    }
    best: dict[str, float] = {}
    for start in range(options.rounds):
        ids = [(7919 * (start + 1) + 11 * place) % 31_000 + 1 for place in range(64)]
        for kind, engine in engines.items():
            took = measure(engine, ids, 256) / 255
            best[kind] = min(took, best.get(kind, took))
    stats = engines["draft"].core.stats()
    print(
        f"{options.draft_layers} of {options.layers} layers draft: {best['plain'] * 1e3:.1f} ms, "
        f"{best['draft'] * 1e3:.1f} ms a token, {best['plain'] / best['draft']:.2f}x, "
        f"{stats.num_accepted_tokens / max(1, stats.num_draft_tokens):.0%} of "
        f"{stats.num_draft_tokens / max(1, stats.num_drafts):.1f} drafts a step accepted"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--only", default="", help="Loads whose names hold this.")
    parser.add_argument("--draft-layers", type=int, help="A draft model of so many layers.")
    parser.add_argument("--share", type=float, default=0.3, help="Of what other layers add.")
    parser.add_argument("--neighbours", action="store_true", help="What drafts cost others.")
    parser.add_argument("--model", type=Path, help="For --neighbours, with its tokenizer.")
    parser.add_argument("--steps", type=int, default=150, help="Of each of --neighbours.")
    parser.add_argument("--most", type=int, default=5, help="Most drafts of a step.")
    options = parser.parse_args()
    ensure("benchmarks.speculation")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if options.draft_layers:
            report_draft_model(options, directory)
            return
        if options.neighbours:
            tokens = options.tokenizer or options.model or ROOT / "src" / "inlay" / "demo" / "model"
            if options.model is None:
                write_model(directory, options.layers)
            neighbours = Neighbours(options.model or directory, tokens)
            for kind, count in NEIGHBOURS:
                if options.only in kind:
                    neighbours.report(kind, count, options.steps)
            return
        write_model(directory, options.layers)
        tokens = options.tokenizer or directory
        if tokens is directory:
            train(directory, files=600, vocab_size=32_000)
        bench = Bench(directory, tokens)
        for load in loads():
            if options.only in load.name:
                bench.report(load, options.rounds)


if __name__ == "__main__":
    main()
