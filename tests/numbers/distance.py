"""How far an output is from float32, over the distance of the reference library's own.

REL is the distance of two outputs [..., T, V]: for logits of centred ones, whose common constant
means nothing. It has no logarithm of nothing, and needs no softmax.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from inlay.engine.settings import EngineSettings
from inlay.engine.torch.batch import Batch, BatchItem
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.model import CausalModel
from inlay.messages.prompt import Prompt, Tokens
from tests.models import VOCAB_SIZE

BOUND = 1.5
"""Largest distance of ours over theirs: rounding at other places changes it by up to 1.3."""

_FLOOR = 1e-3
"""Added to errors: below it a difference changes no answer."""

LENGTH, DECODED, PAGE = 96, 12, 16
CUTS = (40, 84, *range(85, LENGTH + 1))
"""Ends of the steps of a prompt: two chunks, then positions one by one."""


Distance = Callable[[Tensor, Tensor], float]
"""Of an output to an exact one."""


def rel(exact: Tensor, found: Tensor) -> float:
    """Root mean square over all positions of |difference| / |exact|."""
    return float((errors(exact, found) ** 2).mean() ** 0.5)


def typical(exact: Tensor, found: Tensor) -> float:
    """The geometric mean over all positions, of models with experts.

    Where rounding makes a router choose another expert, a position is as far as with a fault.
    """
    return float((errors(exact, found) + _FLOOR).log().mean().exp())


def errors(exact: Tensor, found: Tensor) -> Tensor:
    """|difference| / |exact| of each position [...]."""
    exact, found = exact.double(), found.double()
    errors: Tensor = (found - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-12)
    return errors


def ratio(
    exact: Tensor, found: Tensor, rounded: Iterable[Tensor], distance: Distance = rel
) -> float:
    """The distance of what is `found`, over the smallest of the reference's own in bfloat16."""
    noise = min(distance(exact, each) for each in rounded)
    assert 1e-4 < noise < 0.5, f"these weights say nothing in bfloat16: its noise is {noise:.2g}"
    return distance(exact, found) / noise


def centred(logits: Tensor) -> Tensor:
    """Logits without their mean over the vocabulary."""
    found: Tensor = logits.double() - logits.double().mean(-1, keepdim=True)
    return found


def prompts(count: int = 3, length: int = LENGTH) -> list[list[int]]:
    """Prompts of random ids."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCAB_SIZE, (count, length), generator=generator).tolist()


def load(directory: Path, **options: Any) -> CausalModel:
    """The engine's model, with defaults; its faster modules are all there, as none is checked."""
    given: dict[str, Any] = {
        "max_model_len": 512, "device": "cpu", "num_threads": 1, "self_check": "off"
    }  # fmt: skip
    return CausalModel.load(EngineSettings.of(model=str(directory), **(given | options)))


def spread(length: int = LENGTH) -> Tensor:
    """Positions [T] that step further and further apart, to where slow angles turn."""
    steps = torch.arange(length)
    return steps + (8000 * (steps / length) ** 4).long()


def logits_of(
    model: CausalModel, prompts: Sequence[Sequence[int]], places: Tensor | None = None
) -> Tensor:
    """Centred logits of all positions [P, T, V], as a server computes them.

    All prompts together, in chunks and then one by one, over pages that lie scattered; at rotary
    positions `places` [T] unless these are 0 to T - 1.
    """
    asked = [Asked(Prompt.of(Tokens(list(ids))), places=places) for ids in prompts]
    return torch.stack(answers(model, asked, CUTS))


class Asked(NamedTuple):
    """A prompt without media.

    Attributes:
        rope: [3, T], as a sequence has it.
        wholes: likewise.
        places: [T], rotary positions in place of 0 to T - 1.
    """

    prompt: Prompt
    rope: "npt.NDArray[np.int64] | None" = None
    wholes: Sequence[tuple[int, int]] = ()
    places: Tensor | None = None

    def item(self, start: int, stop: int, pages: Sequence[PageRun]) -> BatchItem:
        """Positions from `start` on as a part of a step."""
        return BatchItem(
            self.prompt.spans(start, stop),
            start,
            stop - start,
            pages,
            sampled=stop - start,
            rope=None if self.rope is None else self.rope[:, start:stop],
            atomic_spans=[each for each in self.wholes if start <= each[0] and each[1] <= stop],
            decoding=stop - start == 1,
        )


def answers(model: CausalModel, asked: Sequence[Asked], cuts: Sequence[int]) -> list[Tensor]:
    """Centred logits of all positions of prompts [T, V] that are computed together.

    Args:
        model: the engine's.
        asked: of different lengths.
        cuts: ends of the steps; the last is the longest prompt's.
    """
    groups, each = len(model.page_groups), -(-cuts[-1] // PAGE)
    order = torch.randperm(
        len(asked) * groups * each, generator=torch.Generator().manual_seed(6)
    ).view(len(asked), groups, each)
    owned = [[PageRun(run.tolist()) for run in own] for own in (order + 1).unbind()]
    pages = model.new_pages(order.numel(), PAGE)
    found: list[list[Tensor]] = [[] for _ in asked]
    start = 0
    for stop in cuts:
        going = [number for number, each in enumerate(asked) if len(each.prompt) > start]
        items = [
            asked[number].item(start, min(stop, len(asked[number].prompt)), owned[number])
            for number in going
        ]
        batch = Batch.pack(items, PAGE)._replace(bidirectional_layers=model.bidirectional)
        far = [asked[number].places for number in going]
        if any(each is not None for each in far):
            places = [each[start:stop] for each in far if each is not None]
            batch = batch._replace(positions=torch.cat(places))
        logits = model.forward(batch, pages)
        parts = torch.split_with_sizes(logits, [item.count for item in items])
        for number, part in zip(going, parts, strict=True):
            found[number].append(centred(part))
        start = stop
    return [torch.cat(parts) for parts in found]


class Reference:
    """What transformers computes of one checkpoint: in float32, and in bfloat16.

    Attributes:
        exact: centred logits in float32 [P, T, V].
        rounded: the same in bfloat16, by each of its implementations of attention.
    """

    def __init__(
        self, directory: Path, prompts: Sequence[Sequence[int]], places: Tensor | None = None
    ) -> None:
        ids = torch.tensor(prompts)
        given: dict[str, Any] = {"input_ids": ids}
        if places is not None:
            # Without a mask, a jump of positions would begin another sequence.
            given |= {"position_ids": places.expand_as(ids), "attention_mask": torch.ones_like(ids)}

        def model(dtype: torch.dtype) -> Any:
            return AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, attn_implementation="eager"
            )

        self.rounded: dict[str, Tensor] = {}
        with torch.no_grad():
            theirs = model(torch.bfloat16)
            for name in ("eager", "sdpa"):
                if name == "eager" or theirs._supports_sdpa:
                    theirs.set_attn_implementation(name)
                    self.rounded[name] = centred(theirs(**given).logits)
            self.exact = centred(model(torch.float32)(**given).logits)

    def distances(self, found: Tensor) -> Tensor:
        """log(error / the larger noise of the reference) of each position [P, T]."""
        noise = torch.stack([errors(self.exact, each) for each in self.rounded.values()]).amax(0)
        return (errors(self.exact, found) + _FLOOR).log() - (noise + _FLOOR).log()


@cache
def reference(directory: Path, *, far: bool = False) -> Reference:
    """Of a directory, which does not change; at positions that are spread if `far`."""
    return Reference(directory, prompts(), spread() if far else None)


def text_ratio(directory: Path, of: Path | None = None, distance: Distance = rel) -> float:
    """The engine's distance to float32 over transformers', which reads the values in `of`."""
    model = load(directory)
    assert model.dtype == torch.bfloat16
    truth = reference(of or directory)
    found = logits_of(model, prompts())
    return ratio(truth.exact, found, truth.rounded.values(), distance)
