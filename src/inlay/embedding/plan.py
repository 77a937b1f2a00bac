"""Outputs of one forward pass, by name, as the files of a model describe them.

An output keeps something of each sequence's positions and puts a head over it. The four ways to
keep are `Keep`; all of them read one sequence alone, so that no output depends on a batch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

PoolingMode: TypeAlias = Literal[
    "cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"
]
"""Names and order of sentence-transformers."""

POOLING_MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)

OutputName: TypeAlias = Literal["dense", "sparse", "tokens", "labels", "token_labels"]
"""`dense` is one vector, `sparse` a weight for some ids of the vocabulary, `tokens` a vector for
each position, `labels` and `token_labels` the logits of classes."""

Source: TypeAlias = Literal["states", "vocabulary", "classes"]
"""Inputs of an output: last hidden states, or a head's logits of the vocabulary or of classes."""

Keep: TypeAlias = Literal["one", "each", "vocabulary", "ids"]
"""Things that an output keeps: one vector of all positions, one of each, the largest or the sum of
each column of the vocabulary, or the largest of each id that stands in the text."""

Finish: TypeAlias = Literal["none", "normalize", "log1p", "log1p_log1p"]
"""The last step. Sparse weights are positive before it."""


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """One linear layer with an activation.

    Attributes:
        path: directory of its weights, or a file by `torch.save`.
        in_features: input size.
        out_features: output size.
        bias: True if the layer has one.
        activation: one of the values of `inlay.embedding.files.ACTIVATIONS`.
        prefix: beginning of the names of its weights.
    """

    path: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    prefix: str = "linear."


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """One output.

    Attributes:
        name: what requests call it.
        source: what it reads.
        keep: what of it is kept.
        select: of `one`, the pooling modes whose results are concatenated, None where the files do
            not say; of `vocabulary`, "max" or "sum".
        head: layers over what is kept.
        finish: the last step.
        mean: a score by MaxSim is the mean over a query's vectors, else their sum.
        words: of a score by the logits of a decoder's next token: the token that says yes, and
            the one that says no, if there is one.
    """

    name: OutputName
    source: Source = "states"
    keep: Keep = "one"
    select: tuple[str, ...] | None = ()
    head: tuple[DenseConfig, ...] = ()
    finish: Finish = "none"
    mean: bool = False
    words: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RolePlan:
    """Treatment of texts of one role; tokens are those of the vocabulary.

    Attributes:
        marker: token that is inserted behind the special tokens before a text, or None.
        at_most: positions of a text, special tokens included; longer ones are cut. None for the
            model's own limit.
        at_least: positions to which a text is filled up.
        filler: token that fills up; None for the tokenizer's own mask.
        attend: True if other positions see those that fill up.
        skip: tokens whose vectors are left out.
        suffix: text behind each text, of tokens of its own.
        static: directory of weights that make sparse vectors of such texts without the model.
    """

    marker: str | None = None
    at_most: int | None = None
    at_least: int = 0
    filler: str | None = None
    attend: bool = False
    skip: tuple[str, ...] = ()
    suffix: str = ""
    static: Path | None = None
