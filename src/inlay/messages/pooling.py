"""Parameters of requests to models that embed or score, and what such a model says of itself."""

from typing import Final

import msgspec

from inlay.base.errors import InvalidRequestError

CHUNKS: Final = "chunks"
"""Output of a model whose dense vector is a mean: the mean of each span of positions instead, with
all that follows."""


class Pooling(msgspec.Struct, frozen=True, kw_only=True, tag="pooling", omit_defaults=True):
    """Parameters of a request for embeddings or scores.

    Attributes:
        second_from: of each prompt, the position from which on it is the second text of a pair
            (token type 1), its length where it is none; empty where there are no pairs.
        outputs: names of `EmbeddingCard.outputs`; empty for the model's first, on the port of its
            task.
        visible: of each prompt, the first positions that others see; empty where they see all.
        max_active: weights that are kept of a sparse vector, the largest; 0 for all.
        spans: of each prompt, for the output `CHUNKS`, the positions at which its chunks begin, and
            its length; empty where that is not asked.
    """

    second_from: tuple[int, ...] = ()
    outputs: tuple[str, ...] = ()
    visible: tuple[int, ...] = ()
    max_active: int = 0
    spans: tuple[tuple[int, ...], ...] = ()


class OutputCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One output of a model that embeds, as requests name it.

    Attributes:
        name: "dense", "sparse", "tokens", "labels" or "token_labels".
        size: elements of a vector, ids of a vocabulary, or number of classes.
        normalize: its vectors have length 1 unless a client asks otherwise.
        first: of what is given for each position, the first that has a vector.
        mean: a score by MaxSim is the mean over a query's vectors, else their sum.
        of_ids: a sparse vector has weights for ids of the text alone.
        labels: names of classes; empty where nobody says.
        pooling: of one vector of all positions, sentence-transformers' names of how it is made; of
            weights of the vocabulary, "max" or "sum".
        linear: such a vector of two texts one after another is the mean of theirs by positions.
    """

    name: str
    size: int
    normalize: bool = False
    first: int = 0
    mean: bool = False
    of_ids: bool = False
    labels: tuple[str, ...] = ()
    pooling: tuple[str, ...] = ()
    linear: bool = False


class RoleCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Treatment of the texts of a role.

    Attributes:
        marker: token id behind the special tokens before a text, or None.
        at_most: positions of a text; longer ones are cut. None: the model's limit.
        at_least: positions to which a text is filled up with `filler`.
        filler: token id.
        attend: other positions see those that fill up.
        skip: token ids whose vectors are left out.
        suffix: token ids behind a text, before the special tokens there.
        static: directory of weights (`inlay.embedding.static`) from which a frontend makes sparse
            vectors of such texts, without special tokens; None: the model does.
    """

    marker: int | None = None
    at_most: int | None = None
    at_least: int = 0
    filler: int = 0
    attend: bool = False
    skip: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    static: str | None = None


class EmbeddingCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts about a model that embeds.

    Attributes:
        size: elements of a vector; of a scoring model, its labels.
        normalize: vectors have length 1 unless a client asks otherwise.
        any_dimensions: a vector may be shortened to any number of its first elements.
        dimensions: the numbers of elements it may be shortened to, where not to any.
        prompts: what is put before a text, by name ("query", "document").
        default_prompt: name of the one that is put before texts of requests that name none.
        lower_case: texts are lowered before they are tokenized.
        unit: vectors leave the engine with length 1 already: requests that want another are
            refused.
        activation: what makes scores of a scoring model's logits: "sigmoid", "softmax", "tanh" or
            "identity".
        labels: of a scoring model, what its labels are called; empty where nobody says.
        outputs: what requests may name, the first unless they do; empty of a worker that gives
            vectors, or scores, alone.
        roles: of "query" and "document", where the model treats their texts differently.
        templated: it scores prompts that a template makes of a pair, not pairs of texts.
        instruction: what that template is told where a request tells nothing, or None.
    """

    size: int
    normalize: bool = True
    any_dimensions: bool = False
    dimensions: tuple[int, ...] = ()
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    lower_case: bool = False
    unit: bool = False
    activation: str = "identity"
    labels: tuple[str, ...] = ()
    outputs: tuple[OutputCard, ...] = ()
    roles: dict[str, RoleCard] = {}
    templated: bool = False
    instruction: str | None = None

    def output(self, name: str, model: str, param: str = "outputs") -> OutputCard:
        """Return the output called `name`; `CHUNKS` has the form of `dense`.

        Raises:
            InvalidRequestError: the model has none; the message lists those that it has.
        """
        if name == CHUNKS:
            return self._of_chunks(model, param)
        for each in self.outputs:
            if each.name == name:
                return each
        has = ", ".join(each.name for each in self.outputs) or "nothing that may be named"
        raise InvalidRequestError(
            f"the model `{model}` gives {has}; {name[:80]!r} was asked for", param=param
        )

    def _of_chunks(self, model: str, param: str) -> OutputCard:
        dense = next((each for each in self.outputs if each.name == "dense"), None)
        if dense is None or dense.pooling != ("mean",):
            how = (
                "gives none" if dense is None else f"takes {', '.join(dense.pooling) or 'another'}"
            )
            raise InvalidRequestError(
                "late chunking is of models whose vector is the mean of all positions; the model "
                f"`{model}` {how}",
                param=param,
            )
        return dense
