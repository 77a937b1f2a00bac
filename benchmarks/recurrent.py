"""Models with recurrent layers: the engine beside transformers, which has a cache of its own.

    python -m benchmarks.recurrent                  8 layers, 6 of them recurrent, in bfloat16
    python -m benchmarks.recurrent --layers 24 --rounds 2
    python -m benchmarks.recurrent --drafts 3       a step with guesses beside one without

CPU seconds of a prompt until its first token, and of a token afterwards; the best of the rounds,
taken in turns in one process. With guesses, those of a step: all of them right, or none.
"""

import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from benchmarks._environment import ensure
from benchmarks._options import parser_of
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.cache_events import CacheEventQueue
from inlay.engine.torch.loading import core_of
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.plan import ScheduledChunk
from inlay.engine.torch.sequence import Sequence
from inlay.engine.torch.speculation import Speculator
from inlay.engine.torch.step import Core
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Request, Sampling

CASES = ((64, 1, 24), (64, 8, 16), (64, 32, 8), (1024, 1, 8))
"""Positions of a prompt, sequences, new tokens."""


def write_model(directory: Path, layers: int) -> None:
    config = Qwen3_5TextConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)


def ours(
    core: Core, prompts: Tensor, new: int, outputs: dict[str, list[int]] | None = None
) -> tuple[float, float]:
    """Return CPU seconds until every sequence has a token, and of a step afterwards.

    The outputs go into `outputs`.
    """
    told: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    sampling = Sampling(max_tokens=new, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts.tolist()):
        core.admit(Request(id=str(number), prompts=(Prompt.of(Tokens(prompt)),), params=sampling))
    start, seen, first, steps = time.process_time(), set[str](), 0.0, 0
    while len(core):
        for output in core.step():
            seen |= {output.request_id} if output.token_ids else set()
            told[output.request_id] += output.token_ids
        steps += bool(first)
        if not first and len(seen) == len(prompts):
            first = time.process_time() - start
    took = (time.process_time() - start - first) / steps
    if outputs is not None:
        outputs |= told
    return first, took


@torch.inference_mode()
def theirs(model: Any, prompts: Tensor, new: int) -> tuple[float, float]:
    """Return the same of transformers."""
    start = time.process_time()
    found = model(prompts, use_cache=True, logits_to_keep=1)
    first = time.process_time() - start
    for _ in range(new - 1):
        token = found.logits[:, -1:].argmax(-1)
        found = model(token, past_key_values=found.past_key_values, use_cache=True)
    return first, (time.process_time() - start - first) / (new - 1)


class Known:
    """A drafter that knows the output, or says another token."""

    def __init__(self, right: bool) -> None:
        self.right = right
        self.outputs: dict[str, list[int]] = {}

    def available(self, sequence: Sequence, limit: int) -> int:
        """As `Drafter`."""
        return limit

    def draft(
        self, counts: Mapping[Sequence, int], room: int
    ) -> Mapping[Sequence, tuple[int, ...]]:
        """As `Drafter`."""
        found = {}
        for sequence, count in counts.items():
            at = len(sequence.output)
            known = self.outputs[sequence.request.id][at : at + count]
            found[sequence] = tuple(id_ if self.right else id_ ^ 1 for id_ in known)
        return found

    def forget(self, sequence: Sequence) -> None:
        """As `Drafter`."""


class Eager(Speculator):
    """Takes all steps for equally long, so that all guesses are tried."""

    def timed(self, chunks: Iterable[ScheduledChunk], seconds: float) -> None:
        """As in `Speculator`."""
        super().timed(chunks, 0.001)


def report_drafts(plain: Core, secret: Secret, drafts: int, rounds: int) -> None:
    """Print what a step takes with and without guesses."""
    new = 8 * (drafts + 1) + 2
    for length, sequences in ((64, 1), (64, 8)):
        prompts = torch.randint(3, 30_000, (sequences, length))
        outputs: dict[str, list[int]] = {}
        cells = []
        for kind in ("none", "wrong", "right"):
            core, drafter = plain, Known(kind == "right")
            if kind != "none":
                drafter.outputs = outputs
                speculator = Eager(drafter, drafts)
                core = Core(plain.model, plain.bounds, secret, speculator=speculator)
            best = float("inf")
            for _ in range(rounds):
                core.reset_prefix_cache()
                best = min(best, ours(core, prompts, new, outputs)[1])
            cells.append(f"{kind} {best * 1e3:.1f} ms")
        print(f"{sequences} sequences, a step with {drafts} guesses: {', '.join(cells)}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", type=int)
    options = parser.parse_args()
    ensure("benchmarks.recurrent")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory, options.layers)
        settings = EngineSettings.of(model=name, device="cpu", num_threads=1, max_model_len=2048)
        secret = Secret.random()
        core = core_of(
            settings, CausalModel.load(settings), secret, CacheEventQueue(settings, secret)
        )
        if options.drafts:
            report_drafts(core, secret, options.drafts, options.rounds)
            return
        peer = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        print(f"pages of {core.bounds.page_size} positions")
        print(f"{'prompt':>6} {'sequences':>9} {'prompt: ours, theirs':>28} {'a token':>28}")
        for length, sequences, new in CASES:
            best: dict[str, tuple[float, float]] = {}
            for _ in range(options.rounds):
                prompts = torch.randint(3, 30_000, (sequences, length))
                for kind, took in (
                    ("ours", ours(core, prompts, new)),
                    ("theirs", theirs(peer, prompts, new)),
                ):
                    before = best.get(kind, took)
                    best[kind] = min(took[0], before[0]), min(took[1], before[1])
            pairs = zip(best["ours"], best["theirs"], strict=True)
            cells = (f"{a * 1e3:8.1f} {b * 1e3:8.1f} ms {b / a:5.2f}x" for a, b in pairs)
            print(f"{length:6} {sequences:9} {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
