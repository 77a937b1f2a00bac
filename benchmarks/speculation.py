"""Speculative decoding: one request with it beside the same without.

    python -m benchmarks.speculation                by n-gram look-up; a random model of
                                                    Qwen3-0.6B's shape in bfloat16
    python -m benchmarks.speculation --layers 4 --rounds 2 --tokenizer DIR
    python -m benchmarks.speculation --draft-layers 2
                                                    by a draft model

A random model has nothing to say, so a grammar that allows one text holds both to it: the edited
file, the summary. How many drafts are accepted is then a property of the texts. The masks of the
grammar are computed for every token, with and without. Times are CPU seconds of the process from
the first token to the last, the best of the rounds. Without `--tokenizer` one of 32,000 tokens is
trained on installed Python packages.

A draft model here is the first layers of the served one, with a vocabulary of 32,000. How often it
guesses right is set by how little the layers behind them add (`--share`): this shows what a given
acceptance is worth, not what acceptance a trained pair has.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks._environment import ensure
from benchmarks.engine import Ours, write_model
from benchmarks.structured import EOS_ID, VOCAB_SIZE, train
from inlay.engine.speculation import SpeculativeConfig
from inlay.engine.torch.grammar.grammars import Grammars
from inlay.render.tokenizer import load_tokenizer
from inlay.request import Grammar

ROOT = Path(__file__).resolve().parent.parent
CONFIG = SpeculativeConfig(method="ngram")


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--draft-layers", type=int, help="A draft model of so many layers.")
    parser.add_argument("--share", type=float, default=0.3, help="Of what other layers add.")
    parser.add_argument("--most", type=int, default=5, help="Most drafts of a step.")
    options = parser.parse_args()
    ensure("benchmarks.speculation")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if options.draft_layers:
            report_draft_model(options, directory)
            return
        write_model(directory, options.layers)
        tokens = options.tokenizer or directory
        if tokens is directory:
            train(directory, files=600, vocab_size=32_000)
        tokenizer = load_tokenizer(tokens).tokenizer
        grammars = Grammars(tokens, VOCAB_SIZE, (EOS_ID,))
        engines = {
            "plain": Ours(directory, 1, 4, 8192),
            "ngram": Ours(directory, 1, 4, 8192, speculation=CONFIG),
        }
        print(f"{'load':10} {'tokens':>6} {'plain':>9} {'ngram':>9} {'gain':>6} {'accepted':>9}")
        for load, (asked, answer) in {"code edit": edit(), "summary": summary()}.items():
            prompt, told = (
                tokenizer.encode(text, add_special_tokens=False).ids for text in (asked, answer)
            )
            grammar = Grammar("choice", json.dumps([answer]))
            best: dict[str, float] = {}
            for _ in range(options.rounds):
                for kind, engine in engines.items():
                    engine.bind(grammar, grammars)
                    took = measure(engine, prompt, len(told))
                    best[kind] = min(took, best.get(kind, took))
            stats = engines["ngram"].core.stats()
            per_token = {kind: took / (len(told) - 1) * 1e3 for kind, took in best.items()}
            print(
                f"{load:10} {len(told):6} {per_token['plain']:6.1f} ms {per_token['ngram']:6.1f} ms "
                f"{best['plain'] / best['ngram']:5.2f}x "
                f"{stats.num_accepted_tokens / max(1, stats.num_draft_tokens):8.0%}"
            )
        grammars.close()


if __name__ == "__main__":
    main()
