"""Layouts of checkpoints that make vectors, each read to the same `OutputPlan`s.

- sentence-transformers' modules: dense, SPLADE, and multi-vector models
- PyLate up to 3: a Transformer and Dense layers, the rest in config_sentence_transformers.json
- sentence-transformers' Router of a sparse model whose queries need no model
- decoders that score by the logits of words: a Transformer and LogitScore
- Stanford's ColBERT: `HF_ColBERT`, with its projection among the weights, and artifact.metadata
- BGE-M3: a dense model beside sparse_linear.pt and colbert_linear.pt
- transformers' ColQwen2, of pages
- a bare transformer, by its architecture
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from inlay.base.errors import InvalidRequestError
from inlay.embedding.files import activation_of, object_of
from inlay.embedding.plan import (
    POOLING_MODES,
    DenseConfig,
    OutputPlan,
    PoolingMode,
    RolePlan,
)
from inlay.tensors.checkpoint import config_of, stored_tensors
from inlay.tensors.page_prompts import ARCHITECTURE, PagePrompts
from inlay.tensors.state_dict import open_state_dict
from inlay.tensors.weight_files import BGE_M3_HEADS

_FLAGS: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Field names before sentence-transformers 5.2."""

_PUNCTUATION = tuple(string.punctuation)
"""Tokens that ColBERT leaves out of documents, unless its files say otherwise."""

_STATES = OutputPlan("tokens", keep="each")
"""Last hidden states, of a model that has no vectors of its own for positions."""

_WORD_HEADS = ("cls.predictions.", "lm_head.", "vocab_", "generator_", "head.", "decoder.")
"""Beginnings of the names of weights that predict words, in the families that are served."""

_TRANSFORMERS = ("Transformer", "MLMTransformer")
_QUERY_LENGTH = 32


@dataclass(frozen=True)
class EmbeddingLayout:
    """Facts in the files of a directory. Attributes are those of `EmbeddingConfig`."""

    directory: Path
    outputs: tuple[OutputPlan, ...]
    roles: Mapping[str, RolePlan] = field(default_factory=dict)
    guess: str | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


class _Module(NamedTuple):
    kind: str
    path: Path
    config: dict[str, Any]


def read(directory: Path, modules: Sequence[Any], said: Mapping[str, Any]) -> EmbeddingLayout:
    """Read the layout of a directory.

    Args:
        directory: of the model.
        modules: of its modules.json; empty without one.
        said: its config_sentence_transformers.json.

    Raises:
        InvalidRequestError: an unsupported module or setting.
        KeyError, TypeError, ValueError, AttributeError: a damaged file.
    """
    if not modules:
        return _bare(directory)
    named = []
    for each in modules:
        path = directory / str(each.get("path", ""))
        named.append(
            _Module(str(each["type"]).rpartition(".")[2], path, object_of(path / "config.json"))
        )
    if [each.kind for each in named] == ["Router"]:
        return _routed(directory, named[0], said)
    found = _of_modules(directory, named, said)
    heads = _bge_m3(directory, found.outputs[0])
    return replace(found, outputs=(*found.outputs[:1], *heads)) if heads else found


def _routed(directory: Path, router: _Module, said: Mapping[str, Any]) -> EmbeddingLayout:
    """Return the layout of a `Router`: documents by the model, queries by weights of ids."""
    config = object_of(router.path / "router_config.json") or router.config
    if not {"types", "structure"} <= {*config}:
        raise _unsupported(directory, [router.kind])
    kinds = {str(id_): str(kind).rpartition(".")[2] for id_, kind in config["types"].items()}
    routes: dict[str, list[_Module]] = {}
    for role, ids in config["structure"].items():
        if any("/" in id_ or id_.startswith(".") for id_ in ids):
            raise InvalidRequestError(f"{router.path} names modules outside of its directory")
        paths = [router.path / id_ for id_ in ids]
        routes[role] = [
            _Module(kinds[id_], path, object_of(path / "config.json"))
            for id_, path in zip(ids, paths, strict=True)
        ]
    query = [each.kind for each in routes.get("query", ())]
    if {*routes} == {"query", "document"} and query == ["SparseStaticEmbedding"]:
        found = _of_modules(directory, routes["document"], said)
        if [each.name for each in found.outputs] == ["sparse"]:
            return replace(found, roles={"query": RolePlan(static=routes["query"][0].path)})
    shown = "; ".join(
        f"{role}: {', '.join(each.kind for each in some)}" for role, some in routes.items()
    )
    raise InvalidRequestError(
        f"{directory} is a Router ({shown}); served is one with the routes query: "
        "SparseStaticEmbedding, and document: Transformer and SpladePooling"
    )


def _bare(directory: Path) -> EmbeddingLayout:
    names = [str(name) for name in config_of(directory).get("architectures") or ()]
    if "HF_ColBERT" in names:
        return _stanford(directory)
    if (pages := PagePrompts.of(directory)) is not None:
        return _of_pages(directory, pages)
    if other := next((name for name in names if name.startswith("ColQwen2")), None):
        raise InvalidRequestError(
            f"{directory} is {other}, of colpali-engine; served is {ARCHITECTURE}, the form of "
            "transformers, whose script convert_colqwen2_weights_to_hf makes it"
        )
    if any(name.endswith("ForTokenClassification") for name in names):
        labels = OutputPlan("token_labels", source="classes", keep="each")
        return EmbeddingLayout(directory, (labels, _STATES))
    dense = OutputPlan("dense", select=None, finish="normalize")
    if any(name.endswith("ForMaskedLM") for name in names) and _predicts_words(directory):
        sparse = _splade({})
        return EmbeddingLayout(
            directory,
            (dense, _STATES, sparse),
            guess="its architecture predicts masked words, which embedders have as well as SPLADE "
            "models do; if it is one of these, its vectors are sparse: --outputs sparse",
        )
    return EmbeddingLayout(directory, (dense, _STATES))


def _predicts_words(directory: Path) -> bool:
    """Return True if the weights have a masked language model's head: embedders often lost it."""
    return any(each.name.startswith(_WORD_HEADS) for each in stored_tensors(directory))


def _of_modules(
    directory: Path, named: Sequence[_Module], said: Mapping[str, Any]
) -> EmbeddingLayout:
    kinds = [each.kind for each in named]
    transformer, *rest = named
    if kinds == ["Transformer", "LogitScore"]:
        return EmbeddingLayout(transformer.path, (_words(rest[0].config),))
    if kinds == ["Transformer"] and said.get("model_type") == "CrossEncoder":
        return _bare(transformer.path)
    pylate = said.get("model_type") == "ColBERT"
    multi = pylate or said.get("model_type") == "MultiVectorEncoder" or "MultiVectorMask" in kinds
    on_tokens = "token_embeddings" if multi else "sentence_embedding"
    reads = [
        str(each.config.get("module_input_name") or on_tokens)
        if each.kind == "Dense"
        else str(each.config.get("module_input_name") or "sentence_embedding")
        for each in rest
    ]
    for each, name in zip(rest, reads, strict=True):
        writes = each.config.get("module_output_name") or name
        if each.kind in ("Dense", "Normalize") and writes != name:
            raise InvalidRequestError(
                f"{each.path} reads {name} and writes {writes}, which is not served"
            )
    if transformer.kind in _TRANSFORMERS and multi:
        dense = [each for each in rest if each.kind == "Dense"]
        others = {each.kind for each in rest} - {"Dense", "MultiVectorMask", "Normalize"}
        if others or set(reads[: len(rest)]) - {"token_embeddings", "sentence_embedding"}:
            raise _unsupported(directory, kinds)
        normalize = pylate or "token_embeddings" in [
            name for each, name in zip(rest, reads, strict=True) if each.kind == "Normalize"
        ]
        mask = next((each.config for each in rest if each.kind == "MultiVectorMask"), {})
        tokens = OutputPlan(
            "tokens",
            keep="each",
            head=tuple(map(_dense, dense)),
            finish="normalize" if normalize else "none",
            mean=said.get("similarity_fn_name") == "meanmaxsim",
        )
        roles = _pylate(said) if _has_markers(said) else _roles(transformer.path, mask)
        return EmbeddingLayout(transformer.path, (tokens,), roles)
    if transformer.kind in _TRANSFORMERS and kinds[1:] == ["SpladePooling"]:
        return EmbeddingLayout(transformer.path, (_splade(rest[0].config),))
    middle = kinds[2:-1] if kinds[-1] == "Normalize" else kinds[2:]
    fits = kinds[:2] == ["Transformer", "Pooling"] and all(kind == "Dense" for kind in middle)
    if not fits or {*reads} - {"sentence_embedding"}:
        raise _unsupported(directory, kinds)
    dense_output = OutputPlan(
        "dense",
        select=_pooling(rest[0].config, directory),
        head=tuple(_dense(each) for each in rest if each.kind == "Dense"),
        finish="normalize" if kinds[-1] == "Normalize" else "none",
    )
    return EmbeddingLayout(transformer.path, (dense_output, _STATES))


def _words(config: Mapping[str, Any]) -> OutputPlan:
    """Return the score of a `LogitScore`: a logit, less another if there is one."""
    words: tuple[int, ...] = (int(config["true_token_id"]),)
    if config.get("false_token_id") is not None:
        words = (*words, int(config["false_token_id"]))
    return word_score(words)


def word_score(words: tuple[int, ...]) -> OutputPlan:
    """Return the score of a decoder by the logits of words, as `OutputPlan.words` has them."""
    return OutputPlan("labels", source="vocabulary", select=("lasttoken",), words=words)


def _unsupported(directory: Path, kinds: Sequence[str]) -> InvalidRequestError:
    return InvalidRequestError(
        f"{directory} is made of {', '.join(kinds)}; served are Transformer, Pooling, any "
        "number of Dense, and Normalize, in this order; Transformer and SpladePooling; "
        "Transformer and LogitScore; a Router with its router_config.json; and "
        "Transformer, Dense, MultiVectorMask and Normalize of token_embeddings"
    )


def _pooling(config: dict[str, Any], directory: Path) -> tuple[PoolingMode, ...]:
    if config.get("include_prompt") is False:
        raise InvalidRequestError(
            f"{directory} leaves prompts out of its pooling, which is not served"
        )
    named = config.get("pooling_mode")
    if named is None:
        modes: list[Any] = [mode for flag, mode in _FLAGS.items() if config.get(flag)] or ["mean"]
    else:
        modes = [named] if isinstance(named, str) else list(named)
    unknown = [mode for mode in modes if mode not in POOLING_MODES]
    if unknown:
        raise InvalidRequestError(
            f"pooling {unknown[0]!r} is not served; served: {', '.join(POOLING_MODES)}"
        )
    return tuple(cast("list[PoolingMode]", modes))


def _dense(module: _Module) -> DenseConfig:
    config = module.config
    if config.get("use_residual"):
        raise InvalidRequestError(
            f"{module.path} is a Dense layer with a residual, which is not served"
        )
    return DenseConfig(
        module.path,
        int(config["in_features"]),
        int(config["out_features"]),
        bool(config.get("bias", True)),
        activation_of(
            config.get("activation_function", "torch.nn.modules.activation.Tanh"), module.path
        ),
    )


def _splade(config: Mapping[str, Any]) -> OutputPlan:
    """Return the output of a `SpladePooling`: weights of the whole vocabulary."""
    strategy = config.get("pooling_strategy", "max")
    activation = config.get("activation_function", "relu")
    if strategy not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise InvalidRequestError(
            f"SpladePooling takes {strategy!r} of {activation!r}, which is not served; served: "
            "max or sum, of relu or log1p_relu"
        )
    return OutputPlan(
        "sparse",
        source="vocabulary",
        keep="vocabulary",
        select=(strategy,),
        finish="log1p" if activation == "relu" else "log1p_log1p",
    )


def _roles(transformer: Path, mask: Mapping[str, Any]) -> dict[str, RolePlan]:
    """Return the roles of sentence-transformers' own multi-vector models.

    Their markers are part of the prompts, and special tokens of the tokenizer.
    """
    if mask.get("keep_only_token_ids"):
        raise InvalidRequestError(
            "MultiVectorMask keeps only some token ids (keep_only_token_ids), which is not served"
        )
    settings = object_of(transformer / "sentence_bert_config.json")
    skip = tuple(map(str, mask.get("skiplist_words") or ()))
    tasks = mask.get("skiplist_tasks") or ["document"]
    expansion = settings.get("query_expansion")
    query = RolePlan(at_most=settings.get("query_length"))
    if expansion:
        length = int(expansion["length"])
        most = query.at_most
        query = RolePlan(
            at_most=length
            if expansion["strategy"] == "fixed"
            else (None if most is None else max(most, length)),
            at_least=length,
            filler=expansion.get("token"),
            attend=bool(expansion.get("attend")),
        )
    document = RolePlan(at_most=settings.get("document_length"))
    return {
        name: replace(plan, skip=skip if name in tasks else ())
        for name, plan in (("query", query), ("document", document))
    }


def _has_markers(said: Mapping[str, Any]) -> bool:
    return said.get("model_type") == "ColBERT" or "query_prefix" in said


def _pylate(said: Mapping[str, Any]) -> dict[str, RolePlan]:
    skip = said.get("skiplist_words")
    expands = said.get("do_query_expansion") is not False
    length = int(said.get("query_length") or _QUERY_LENGTH)
    return {
        "query": RolePlan(
            marker=said.get("query_prefix") or None,
            at_most=length if expands else said.get("query_length"),
            at_least=length if expands else 0,
            attend=bool(said.get("attend_to_expansion_tokens")),
        ),
        "document": RolePlan(
            marker=said.get("document_prefix") or None,
            at_most=said.get("document_length"),
            skip=_PUNCTUATION if skip is None else tuple(map(str, skip)),
        ),
    }


def _stanford(directory: Path) -> EmbeddingLayout:
    said = object_of(directory / "artifact.metadata")
    shapes = {each.name: each.shape for each in stored_tensors(directory)}
    if "linear.weight" not in shapes:
        raise InvalidRequestError(
            f"{directory} is HF_ColBERT without its projection: no tensor linear.weight"
        )
    size, hidden = shapes["linear.weight"]
    length = int(said.get("query_maxlen") or _QUERY_LENGTH)
    layer = DenseConfig(directory, hidden, size, "linear.bias" in shapes, "identity")
    tokens = OutputPlan("tokens", keep="each", head=(layer,), finish="normalize")
    skips = bool(said.get("mask_punctuation", True))
    roles = {
        "query": RolePlan(
            marker=said.get("query_token_id") or "[unused0]",
            at_most=length,
            at_least=length,
            attend=bool(said.get("attend_to_mask_tokens")),
        ),
        "document": RolePlan(
            marker=said.get("doc_token_id") or "[unused1]",
            at_most=said.get("doc_maxlen"),
            skip=_PUNCTUATION if skips else (),
        ),
    }
    return EmbeddingLayout(directory, (tokens,), roles)


def _of_pages(directory: Path, pages: PagePrompts) -> EmbeddingLayout:
    """Return the layout of ColQwen2. Its processor takes any text as a query."""
    shapes = {each.name: each.shape for each in stored_tensors(directory)}
    size, hidden = shapes["embedding_proj_layer.weight"]
    layer = DenseConfig(directory, hidden, size, True, "identity", "embedding_proj_layer.")
    tokens = OutputPlan("tokens", keep="each", head=(layer,), finish="normalize")
    role = RolePlan(suffix=pages.suffix)
    return EmbeddingLayout(
        directory,
        (tokens,),
        {"query": role, "document": role},
        prompts={"query": pages.query},
        default_prompt="query",
    )


def _bge_m3(directory: Path, dense: OutputPlan) -> tuple[OutputPlan, ...]:
    """Return the outputs of BGE-M3's heads, which no other file names; empty without them.

    The first position has no vector, as in FlagEmbedding's `_process_colbert_vecs`.
    """
    found = []
    sparse, colbert = (directory / name for name in BGE_M3_HEADS)
    if dense.name == "dense" and colbert.is_file():
        layer = _saved(colbert, "identity")
        found.append(
            OutputPlan(
                "tokens",
                keep="each",
                select=("rest",),
                head=(layer,),
                finish="normalize",
                mean=True,
            )
        )
    if dense.name == "dense" and sparse.is_file():
        layer = _saved(sparse, "relu")
        found.append(OutputPlan("sparse", keep="ids", head=(layer,)))
    if found and found[0].name != "tokens":
        found.insert(0, _STATES)
    return tuple(found)


def _saved(path: Path, activation: str) -> DenseConfig:
    with open_state_dict(path) as tensors:
        shapes = {each.name: each.shape for each in tensors}
    outside, inside = shapes["weight"]
    return DenseConfig(path, inside, outside, "bias" in shapes, activation, prefix="")
