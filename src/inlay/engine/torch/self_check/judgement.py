"""The layer ring and the model ring: the engine's real path against the model's own code.

The distance of a position is the error of ours over the noise of the reference there. Of a group
of positions it is the geometric mean: one position where rounding decides moves it little, while a
fault, which moves all, cannot hide behind one that is noisy by itself.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from inlay.engine.torch.attention.paged import WithOutputsTold
from inlay.engine.torch.batch import Batch, BatchItem
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.self_check.prompts import (
    COUNT,
    DECODED,
    ROWS,
    WINDOW,
    CheckPrompt,
    scattered_pages,
)
from inlay.engine.torch.self_check.reference import (
    Heads,
    Reference,
    centred,
    relative,
    rounding_of,
)
from inlay.engine.torch.weights.joint import MOST, NAME, JointBody
from inlay.engine.torch.weights.linear import RotaryTable
from inlay.engine.torch.weights.linear_methods import differ

if TYPE_CHECKING:
    from inlay.engine.torch.attention.pages import Pages
    from inlay.engine.torch.model import CausalModel

_logger = logging.getLogger(__name__)

BOUND = 2.0
"""Distance over which a model is not served as it is."""

LAYER_BOUND = 4.0
"""Likewise of one layer, given the reference's input, and of each head of its attention."""

TOGETHER_BOUND = 1.5
"""Likewise of the geometric mean of all layers, which chance moves least."""

MOST_NOISE = 0.5
"""Noise over which the reference itself says nothing: its numbers are rounding."""

FLOOR = {torch.float32: 1e-4, torch.bfloat16: 1e-3, torch.float16: 1e-3}
"""Added to error and noise: below it a difference changes no answer."""

_CHUNKS = (9, COUNT - DECODED - 9, *(1,) * DECODED)
"""Positions of each prompt in each step."""


class Judgement(NamedTuple):
    """Result of the comparison of a whole model.

    Attributes:
        distances: of groups of positions, 1 for one as near as rounding.
        layers: distance of each decoder layer; empty if they were not checked.
        noise: typical noise of the reference.
        together: geometric mean of the layers, of "chunks" and of "decoding".
        left_out: as of `ModuleCheck`, what the comparison of the whole has left.
    """

    distances: dict[str, float]
    layers: tuple[float, ...]
    noise: float
    together: dict[str, float] = {}  # noqa: RUF012 - never changed
    left_out: dict[str, float] = {}  # noqa: RUF012 - never changed

    @property
    def distance(self) -> float:
        """The largest of a group; not a number if one is not."""
        return _largest(self.distances.values())

    @property
    def finite(self) -> bool:
        """True if all numbers are."""
        return all(map(math.isfinite, (self.distance, *self.layers, *self.together.values())))

    @property
    def similar(self) -> bool:
        """True if answers, and all layers together, are within their bounds."""
        return self.distance <= BOUND and all(
            mean <= TOGETHER_BOUND for mean in self.together.values()
        )

    @property
    def right(self) -> bool:
        """True if nothing is over its bound; not a number is."""
        return self.similar and all(layer <= LAYER_BOUND for layer in self.layers)

    @property
    def reason(self) -> str:
        """Places that are over their bound."""
        wrong = [
            f"layer {index} {_excess(layer, LAYER_BOUND)}"
            for index, layer in enumerate(self.layers)
            if not layer <= LAYER_BOUND
        ]
        logits = [
            f"logits ({place}) {_excess(distance, BOUND)}"
            for place, distance in self.distances.items()
            if not distance <= BOUND
        ]
        logits += [
            f"all layers together ({place}) {_excess(mean, TOGETHER_BOUND)}"
            for place, mean in self.together.items()
            if not mean <= TOGETHER_BOUND
        ]
        if len(wrong) > 4:
            wrong[4:] = [f"and {len(wrong) - 4} layers more"]
        return ", ".join([*logits, *wrong])


def _excess(distance: float, bound: float) -> str:
    if not math.isfinite(distance):
        return "is not finite" if bound == LAYER_BOUND else "are not finite"
    return f"by {distance:.3g} (allowed: {bound:g})"


def judge(model: "CausalModel", reference: Reference) -> Judgement:
    """Compare the real path of `model` with its reference.

    Chunks of prompts in one batch over scattered pages, then decoding, one position a step.
    """
    return judge_layers(model, reference, judge_answers(model, reference))


def judge_layers(model: "CausalModel", reference: Reference, answers: Judgement) -> Judgement:
    """Compare the layers too; `answers` is what `judge_answers` found."""
    with _fresh_tables(model), torch.inference_mode():
        layers, together = _layers(model, reference, _floor(model))
    model.forget_workspace()
    return answers._replace(layers=layers, together=together)


def judge_answers(model: "CausalModel", reference: Reference) -> Judgement:
    """Compare as `judge`, but no layers."""
    error, noise = logit_errors(model, reference), reference.noise
    found = {
        place: mean_ratio(own, usual, _floor(model), routed=reference.routed)
        for (place, own), (_, usual) in zip(
            grouped(reference, error), grouped(reference, noise), strict=True
        )
    }
    body = model.body
    left = {NAME: body.difference} if isinstance(body, JointBody) and body.apart else {}
    return Judgement(found, (), float(noise.median()), left_out=left)


def _floor(model: "CausalModel") -> float:
    return FLOOR[rounding_of(model.dtype, model.activations)]


def logit_errors(model: "CausalModel", reference: Reference) -> Tensor:
    """Compute the relative distance [P] of the model's logits from the reference's."""
    with _fresh_tables(model), torch.inference_mode():
        logits = centred(_logits(model, reference))
    return relative(logits, reference.logits, reference.logits)


def grouped(reference: Reference, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the groups of positions that are judged: a name, and their part of `values` [P]."""
    for prompt, own in zip(reference.prompts, values.view(-1, COUNT), strict=True):
        for name, part in _parts(prompt).items():
            yield f"{prompt.kind}, {name}", own[part]


def _parts(prompt: CheckPrompt) -> dict[str, slice]:
    """Return the positions of a prompt that are judged together."""
    decoding = slice(COUNT - DECODED, COUNT)
    if not prompt.others:
        return {"chunks": slice(COUNT - DECODED), "decoding": decoding}
    return {"chunks": slice(ROWS.start), "rows": ROWS, "decoding": decoding}


def mean_ratio(error: Tensor, noise: Tensor, floor: float, *, routed: bool = False) -> float:
    """Return the geometric mean of error over noise, both at least about `floor`.

    Where experts are chosen (`routed`), rounding may choose others at one position and be right:
    the largest is left out.
    """
    ratios = ((error + floor).log() - (noise + floor).log()).sort().values
    # What is not a number is sorted as the largest, and must not be left out.
    if not ratios.isfinite().all():
        return math.nan
    return float(ratios[: -1 if routed else None].mean().exp())


def _largest(found: Iterable[float]) -> float:
    """Return the largest; not a number if one is not, which `max` may pass over."""
    return max(found, key=lambda each: (math.isnan(each), each))


def _logits(model: "CausalModel", reference: Reference) -> Tensor:
    """Compute the logits that are compared [P, M]."""
    pages, runs, size = _pages(model, len(reference.prompts))
    ids = reference.ids.view(len(reference.prompts), COUNT, -1)
    start, found = 0, []
    for count in _CHUNKS:
        batch = _batch(model, reference, runs, size, start, count)
        uploaded = model.upload(batch, WINDOW)
        logits = model.logits(_hidden(model, uploaded, pages))
        own = logits.view(len(ids), count, -1).gather(2, ids[:, start : start + count])
        found.append(own.float())
        start += count
    return torch.cat(found, dim=1).flatten(0, 1)


def _hidden(model: "CausalModel", batch: Batch, pages: "Pages") -> Tensor:
    """Compute states [T, C] as they are served.

    Layers in one native call must have the bits of their modules, which else run from now on. An
    earlier start may have seen that.
    """
    found = model.hidden(batch, pages, largest_window=WINDOW)
    body = model.body
    if not isinstance(body, JointBody) or body.apart or body.proven or len(found) > MOST:
        return found
    body.apart = True
    wanted = model.hidden(batch, pages, largest_window=WINDOW)
    body.apart = not torch.equal(found, wanted)
    if body.apart:
        body.difference = differ(found, wanted)
        _logger.warning(
            "%s are left as modules: their output differs by %.3g (allowed: 0)",
            NAME, body.difference,
        )  # fmt: skip
    return wanted


def _layers(
    model: "CausalModel", reference: Reference, floor: float
) -> tuple[tuple[float, ...], dict[str, float]]:
    """Compute the distance of each layer, given the reference's input, and of all together.

    Trained layers are redundant, and answers of large models are noisy: a small fault of all layers
    shows in what they have in common. Of a layer it is the largest, of its output or a head: what
    one head has wrong, a layer of many hides. Empty if the reference has other layers or none.
    """
    layers = reference.layers.moved(model.device)
    if not layers.inputs or len(layers.inputs) != len(model.decoder_layers):
        return (), {}
    kinds: dict[str, list[list[float]]] = {"chunks": [], "decoding": []}
    attending: list[float] = []
    for at, (own, heads) in enumerate(_outputs(model, reference, layers.inputs)):
        given, wanted, noise = layers.inputs[at], layers.outputs[at], layers.noise[at]
        error = relative(own, wanted, wanted.float() - given.float())
        prompts = list(zip(error.view(-1, COUNT), noise.view(-1, COUNT), strict=True))
        parts = (slice(COUNT - DECODED), slice(COUNT - DECODED, COUNT))
        for found, part in zip(kinds.values(), parts, strict=True):
            ratio = partial(mean_ratio, floor=floor, routed=reference.routed)
            found.append([ratio(error[part], noise[part]) for error, noise in prompts])
        attending.append(0.0 if heads is None else _of_heads(heads, layers.heads[at], floor))
    together = {
        kind: math.exp(fmean(math.log(each) for layer in found for each in layer))
        for kind, found in kinds.items()
    }
    return tuple(
        _largest([*chunks, *decoding, of_heads])
        for chunks, decoding, of_heads in zip(*kinds.values(), attending, strict=True)
    ), together


def _of_heads(found: Tensor, kept: Heads, floor: float) -> float:
    """Return the largest distance of a head in `found` [P, Q, E]; not a number if one is not.

    It is the geometric mean over all positions of a prompt.
    """
    error = relative(found, kept.outputs, kept.outputs)
    ratios = (error + floor).log() - (kept.noise + floor).log()
    return float(ratios.view(-1, COUNT, ratios.shape[1]).mean(1).exp().max())


def _outputs(
    model: "CausalModel", reference: Reference, inputs: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield outputs [P, C] of each layer, and [P, Q, E] of its attention if the reference has them.

    The steps of one layer are dropped before those of the next are joined.
    """
    found, heads = _steps(model, reference, inputs)
    for at, steps in enumerate(found):
        attended = heads.get(at)
        yield _joined(steps), _joined(attended) if attended else None


def _joined(steps: list[Tensor]) -> Tensor:
    """Join steps [K, T, ...] of all prompts to [P, ...], and drop them."""
    whole = torch.cat(steps, dim=1).flatten(0, 1)
    steps.clear()
    return whole


def _steps(
    model: "CausalModel", reference: Reference, inputs: Sequence[Tensor]
) -> tuple[list[list[Tensor]], dict[int, list[Tensor]]]:
    """Compute what layers give: at all positions but the last at once, then at these by steps.

    Returns steps [K, T, C] of each layer, and [K, T, Q, E] of attention where the reference has it.
    """
    pages, runs, size = _pages(model, len(reference.prompts))
    found: list[list[Tensor]] = [[] for _ in inputs]
    heads: dict[int, list[Tensor]] = {at: [] for at in reference.layers.heads}
    start = 0
    for count in (COUNT - DECODED, *(1,) * DECODED):
        stop = start + count
        # Ranks share them, which takes memory without gaps.
        given = [
            each.view(-1, COUNT, each.shape[-1])[:, start:stop].flatten(0, 1).contiguous()
            for each in inputs
        ]
        own: list[Tensor] = []
        attended: dict[int, Tensor] = {}
        with _forced(model, given, own, attended):
            batch = _batch(model, reference, runs, size, start, count)
            uploaded = model.upload(batch, WINDOW, forced=True)
            model.hidden(uploaded, pages, largest_window=WINDOW)
        rows = len(given[0])
        for steps, output in zip(found, own, strict=True):
            steps.append(output.view(-1, count, output.shape[-1]))
        for at, output in attended.items():
            if at in heads:
                heads[at].append(output[:rows].view(-1, count, *output.shape[1:]))
        start = stop
    return found, heads


@contextmanager
def following(model: "CausalModel", positions: int) -> Iterator[None]:
    """Have each layer take its input [positions, C] from rank 0, which is in `judge`."""
    empty = torch.empty(positions, model.hidden_size, dtype=model.dtype, device=model.device)
    with _forced(model, [empty] * len(model.decoder_layers), [], {}):
        yield


@contextmanager
def _forced(
    model: "CausalModel",
    inputs: Sequence[Tensor],
    found: list[Tensor],
    attended: dict[int, Tensor],
) -> Iterator[None]:
    """Give each layer one of `inputs` [T, C], within this context, and keep its output [T, C].

    And what its attention gives, by layer. Of several ranks, all give theirs the input that rank 0
    has.
    """

    def keep(layer: int, heads: Tensor) -> None:
        if model.group is None:
            attended[layer] = heads.clone()
        else:
            whole = model.group.gather(heads.flatten(1))
            attended[layer] = whole.view(len(whole), -1, heads.shape[2])

    def before(given: Tensor, _: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if model.group is not None:
            model.group.share(given)
        hidden = (args[0] if args else named["hidden_states"]).clone()
        hidden[0, : len(given)] = given
        named = {**named, "paged": WithOutputsTold(named["paged"], keep)}
        return ((hidden, *args[1:]), named) if args else (args, {**named, "hidden_states": hidden})

    def after(_: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        found.append(hidden[0, : len(inputs[0])].clone())

    with ExitStack() as undo:
        for layer, given in zip(model.decoder_layers, inputs, strict=True):
            hook = layer.register_forward_pre_hook(partial(before, given), with_kwargs=True)
            undo.callback(hook.remove)
            undo.callback(layer.register_forward_hook(after).remove)
        yield


def _pages(model: "CausalModel", sequences: int) -> "tuple[Pages, list[list[list[int]]], int]":
    """Return scattered pages: themselves, page numbers by sequence and group, positions of each."""
    size = model.least_page_size
    runs = scattered_pages(sequences, len(model.page_groups), -(-COUNT // size))
    total = sum(len(pages) for own in runs for pages in own)
    return model.new_pages(total, size), runs, size


def _batch(
    model: "CausalModel",
    reference: Reference,
    runs: Sequence[Sequence[list[int]]],
    page_size: int,
    start: int,
    count: int,
) -> Batch:
    """Return the batch of positions [start, start + count) of all prompts."""
    stop = start + count
    items = [
        BatchItem(
            prompt.segments(model.embedding, model.device, start, stop),
            start,
            count,
            [PageRun(pages) for pages in own],
            count,
            decoding=count == 1,
        )
        for prompt, own in zip(reference.prompts, runs, strict=True)
    ]
    places = [place for prompt in reference.prompts for place in prompt.positions[start:stop]]
    rope = torch.tensor(places).expand(model.rope_axes, -1)
    return Batch.pack(items, page_size)._replace(rope=rope)


@contextmanager
def _fresh_tables(model: "CausalModel") -> Iterator[None]:
    """Drop what tables of angles hold of far positions after this context."""
    try:
        yield
    finally:
        for module in model.modules():
            if isinstance(module, RotaryTable):
                module.clear()
