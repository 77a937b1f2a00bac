"""The heads of a transformers model, taken from around its body, as `outputs.Head`s."""

import copy
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from inlay.embedding.plan import OutputPlan, Source
from inlay.engine.embed.outputs import Each, Head, Ids, Logits, One, Spans, SpladeWeights
from inlay.engine.embed.pooling import dense_layers, pool
from inlay.messages.pooling import CHUNKS
from inlay.render.tokenizer import load_tokenizer

_NO_WORDS = ("cls_token", "eos_token", "pad_token", "unk_token")
"""Tokens without a weight in BGE-M3's sparse vectors."""


def class_of(sources: Collection[Source], *, scores: bool) -> Any:
    """Return the transformers class whose models have the heads that outputs read."""
    if scores and "vocabulary" in sources:
        return AutoModelForCausalLM
    if scores:
        return AutoModelForSequenceClassification
    if "vocabulary" in sources:
        return AutoModelForMaskedLM
    return AutoModelForTokenClassification if "classes" in sources else AutoModel


def head_of(output: OutputPlan, model: Any, directory: Path) -> Head:
    """Return the head of an output of a model that scores no pairs.

    Args:
        output: resolved, so that its modes are known.
        model: of `class_of` its source.
        directory: of the tokenizer.

    Raises:
        InvalidRequestError: weights of a layer that cannot be read or do not fit.
    """
    select = output.select or ()
    if output.source == "vocabulary":
        transform, decoder = _vocabulary_of(model)
        return SpladeWeights(transform, decoder, output.finish, sums=select == ("sum",))
    if output.source == "classes":
        return Each(output.name, _of_positions(_without_body(model)))
    size = int(model.config.get_text_config().hidden_size)
    if output.keep == "one":
        return One(output.name, _pooled(output, model, size))
    layers = dense_layers(output.head, size).to(model.device)
    if output.keep == "each":
        return Each(output.name, lambda states: layers(states.float()))
    loaded = load_tokenizer(directory)
    special = [
        loaded.tokenizer.token_to_id(token)
        for name, token in loaded.special_tokens.items()
        if name in _NO_WORDS
    ]
    return Ids(lambda states: layers(states.float()), [id_ for id_ in special if id_ is not None])


def heads_of(outputs: Sequence[OutputPlan], model: Any, directory: Path) -> dict[str, Head]:
    """Return the heads by output, and `CHUNKS` where the dense vector is a mean.

    Arguments and errors as of `head_of`.
    """
    found: dict[str, Head] = {each.name: head_of(each, model, directory) for each in outputs}
    dense = found.get("dense")
    means = any(each.name == "dense" and each.select == ("mean",) for each in outputs)
    if means and isinstance(dense, One):
        found[CHUNKS] = Spans(dense.pooled)
    return found


def _pooled(output: OutputPlan, model: Any, size: int) -> Callable[[Tensor, Sequence[int]], Tensor]:
    select = output.select or ()
    layers = dense_layers(output.head, size * len(select)).to(model.device)
    return lambda states, lengths: layers(pool(states, lengths, select))


def last_head(model: Any, output: OutputPlan) -> Head:
    """Return the head of a decoder that scores by its last state.

    Of words it is one row: the difference of theirs in the matrix of all logits.
    """
    if output.words:
        rows = model.get_output_embeddings().weight[list(output.words)].detach().float()
        weight = rows[:1] - rows[1:] if len(rows) == 2 else rows
    else:
        weight = model.score.weight.detach().float()

    def logits(states: Tensor, lengths: Sequence[int]) -> Tensor:
        return functional.linear(pool(states, lengths, output.select or ()).float(), weight)

    return One(output.name, logits)


class PairHead:
    """A head that gives logits of a whole sequence: states [T, C] and lengths to [S, labels].

    Args:
        model: with the head.
        pooler: that was the body's, or None.
        output: resolved, so that its modes are known.

    Attributes:
        select: pooling modes of the state that it reads.
        head: from the body's output to logits.
    """

    def __init__(self, model: Any, pooler: Any, output: OutputPlan) -> None:
        self.select = output.select or ()
        self.head = _without_body(model)
        self._pooler = pooler
        self._dtype = model.dtype

    def __call__(self, states: Tensor, lengths: Sequence[int]) -> Tensor:
        """As the class says."""
        first = pool(states, lengths, self.select).to(self._dtype)[:, None]
        pooled = None if self._pooler is None else self._pooler(first)
        return self.head(BaseModelOutputWithPooling(first, pooled)).float()


class _Given(nn.Module):
    """Stand-in for a model's body that returns its input."""

    def forward(
        self,
        *_: Any,
        inputs_embeds: Tensor,
        given: BaseModelOutputWithPooling | None = None,
        **__: Any,
    ) -> BaseModelOutputWithPooling:
        # Some models pass on no more than they know.
        return BaseModelOutputWithPooling(inputs_embeds) if given is None else given


def _without_body(model: Any) -> Callable[[BaseModelOutputWithPooling], Tensor]:
    """Return the function from the body's output to logits, without the body."""
    head = copy.copy(model)
    head._modules = {**model._modules, model.base_model_prefix: _Given()}

    def logits(given: BaseModelOutputWithPooling) -> Tensor:
        # The states also serve as the required input, from which such models take the batch size.
        found: Tensor = head(inputs_embeds=given.last_hidden_state, given=given).logits
        return found

    return logits


def _of_positions(head: Callable[[BaseModelOutputWithPooling], Tensor]) -> Logits:
    return lambda states: head(BaseModelOutputWithPooling(states[None]))[0]


def _vocabulary_of(model: Any) -> tuple[Logits, nn.Linear]:
    """Return what a masked language model does to states [T, C] before its last product, and that.

    The product is taken out of `model`.
    """
    decoder = model.get_output_embeddings()
    for module in model.modules():
        for name, child in module.named_children():
            if child is decoder:
                setattr(module, name, nn.Identity())
    return _of_positions(_without_body(model)), decoder
