"""Tiny models whose outputs are not one dense vector, in the layouts they are published in.

    splade()            BertForMaskedLM with SpladePooling
    routed()            a Router: the same for documents, a weight for each id for queries
    stanford()          HF_ColBERT: projection among the weights, artifact.metadata
    pylate()            a Transformer and a Dense, the rest in config_sentence_transformers.json
    multi_vector()      sentence-transformers' own, with MultiVectorMask
    bge_m3()            dense, beside sparse_linear.pt and colbert_linear.pt
    tagger()            token classes
    pages()             transformers' ColQwen2 around a tiny Qwen2-VL

Markers are words of the vocabulary; `:` is the punctuation that documents leave out.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    ColQwen2Config,
    ColQwen2ForRetrieval,
    ColQwen2Processor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.embedding_models import save_model, sized_embedding, tiny_config, tiny_embedding
from tests.scratch import scratch
from tests.vision_models import vision

SIZE = 16
"""Elements of a vector of a token."""

QUERY_LENGTH, DOCUMENT_LENGTH = 12, 20
LABELS = ("O", "B-PLACE", "I-PLACE")

_ST = "sentence_transformers."


@cache
def masked(name: str = "bert", **sizes: Any) -> Path:
    """A bare masked language model."""
    directory = _root() / f"masked-{name}-{len(list(_root().iterdir()))}"
    save_model(AutoModelForMaskedLM.from_config, tiny_config(name, **sizes), directory, name)
    return directory


@cache
def splade(name: str = "bert", strategy: str = "max", activation: str = "relu") -> Path:
    """A SPLADE model in sentence-transformers' layout."""
    directory = _copy(masked(name), f"splade-{name}-{strategy}-{activation}")
    _modules(
        directory,
        ("", f"{_ST}base.modules.transformer.Transformer", None),
        (
            "1_SpladePooling",
            f"{_ST}sparse_encoder.modules.splade_pooling.SpladePooling",
            {"pooling_strategy": strategy, "activation_function": activation},
        ),
    )
    _write(
        directory,
        "sentence_bert_config.json",
        {
            "transformer_task": "fill-mask",
            "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
            "module_output_name": "token_embeddings",
        },
    )
    _write(directory, "config_sentence_transformers.json", {"model_type": "SparseEncoder"})
    return directory


@cache
def routed(name: str = "bert", *, idf: bool = False) -> Path:
    """A Router whose queries have weights for ids; with `idf` by token, in a file of JSON."""
    source = splade(name)
    directory = _root() / f"routed-{name}-{len(list(_root().iterdir()))}"
    query, document, pooling = (
        directory / each for each in ("query_0_Static", "document_0_MLM", "document_1_Splade")
    )
    query.mkdir(parents=True)
    shutil.copytree(source, document, ignore=shutil.ignore_patterns("modules.json", "1_*"))
    shutil.copytree(source / "1_SpladePooling", pooling)
    for file in document.glob("*token*.json"):
        shutil.copy(file, query)
    vocabulary = json.loads((document / "tokenizer.json").read_text())["model"]["vocab"]
    size = json.loads((document / "config.json").read_text())["vocab_size"]
    weights = torch.rand(size, generator=torch.Generator().manual_seed(1)) * 4
    weights[list(vocabulary.values())[7]] = 0
    if idf:
        _write(query, "config.json", {"frozen": True, "path": "idf.json"})
        by_token = {token: float(weights[id_]) for token, id_ in vocabulary.items()}
        _write(query, "idf.json", by_token)
    else:
        _write(query, "config.json", {"frozen": False})
        save_file({"weight": weights}, query / "model.safetensors")
    modules = f"{_ST}sparse_encoder.modules."
    _write(
        directory,
        "router_config.json",
        {
            "types": {
                query.name: f"{modules}sparse_static_embedding.SparseStaticEmbedding",
                document.name: f"{_ST}base.modules.transformer.Transformer",
                pooling.name: f"{modules}splade_pooling.SpladePooling",
            },
            "structure": {"query": [query.name], "document": [document.name, pooling.name]},
            "parameters": {"default_route": "document", "allow_empty_key": True},
        },
    )
    _modules(directory, ("", f"{_ST}base.modules.router.Router", None))
    said = {"model_type": "SparseEncoder", "prompts": {"query": "", "document": ""}}
    _write(directory, "config_sentence_transformers.json", said)
    return directory


@cache
def stanford(*, attend: bool = False) -> Path:
    """A ColBERT of Stanford's code."""
    directory = _with_mask(tiny_embedding("bert"), f"stanford-{attend}")
    (directory / "modules.json").unlink()
    weights = load_file(directory / "model.safetensors")
    named = {f"bert.{name}": tensor for name, tensor in weights.items()}
    named["linear.weight"] = projection()
    save_file(named, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    _write(directory, "config.json", config | {"architectures": ["HF_ColBERT"]})
    _write(
        directory,
        "artifact.metadata",
        {
            "query_maxlen": QUERY_LENGTH,
            "doc_maxlen": DOCUMENT_LENGTH,
            "mask_punctuation": True,
            "attend_to_mask_tokens": attend,
            "query_token_id": "query",
            "doc_token_id": "passage",
        },
    )
    for name in ("sentence_bert_config.json", "config_sentence_transformers.json"):
        (directory / name).unlink()
    shutil.rmtree(directory / "1_Pooling")
    return directory


@cache
def pylate(*, attend: bool = True, **said: Any) -> Path:
    """A ColBERT of PyLate up to 3; `said` goes into its configuration."""
    directory = _with_mask(tiny_embedding("bert"), f"pylate-{attend}-{len(said)}")
    shutil.rmtree(directory / "1_Pooling")
    _modules(
        directory,
        ("", f"{_ST}models.Transformer", None),
        ("1_Dense", "pylate.models.Dense.Dense", _dense()),
    )
    save_file({"linear.weight": projection()}, directory / "1_Dense" / "model.safetensors")
    _write(
        directory,
        "config_sentence_transformers.json",
        {
            "model_type": "ColBERT",
            "query_prefix": "query ",
            "document_prefix": "passage ",
            "query_length": QUERY_LENGTH,
            "document_length": DOCUMENT_LENGTH,
            "attend_to_expansion_tokens": attend,
            **said,
        },
    )
    return directory


@cache
def multi_vector(strategy: str = "min", *, attend: bool = False) -> Path:
    """A multi-vector model of sentence-transformers 6, with its projection by `torch.save`."""
    directory = _with_mask(tiny_embedding("bert"), f"multi-{strategy}-{attend}")
    shutil.rmtree(directory / "1_Pooling")
    tokens = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    _modules(
        directory,
        ("", f"{_ST}base.modules.transformer.Transformer", None),
        ("1_Dense", f"{_ST}base.modules.dense.Dense", _dense() | tokens),
        (
            "2_MultiVectorMask",
            f"{_ST}multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
            {"skiplist_words": [":", "no-token"], "skiplist_tasks": ["query", "document"]},
        ),
        ("3_Normalize", f"{_ST}base.modules.normalize.Normalize", tokens),
    )
    torch.save({"linear.weight": projection()}, directory / "1_Dense" / "pytorch_model.bin")
    _write(
        directory,
        "sentence_bert_config.json",
        {
            "transformer_task": "feature-extraction",
            "modality_config": {
                "text": {"method": "forward", "method_output_name": "last_hidden_state"}
            },
            "module_output_name": "token_embeddings",
            "document_length": DOCUMENT_LENGTH,
            "query_expansion": {"strategy": strategy, "attend": attend, "length": QUERY_LENGTH},
        },
    )
    _write(
        directory,
        "config_sentence_transformers.json",
        {
            "model_type": "MultiVectorEncoder",
            "prompts": {"query": "query : ", "document": "passage "},
            "similarity_fn_name": "maxsim",
        },
    )
    return directory


@cache
def bge_m3(width: int = SIZE, **sizes: Any) -> Path:
    """A dense model with BGE-M3's heads beside it.

    `width` is of vectors of tokens, `sizes` are fields of its configuration.
    """
    source = sized_embedding("xlm-roberta", **sizes) if sizes else tiny_embedding("xlm-roberta")
    directory = _copy(source, "bge-m3")
    size = sizes.get("hidden_size", 48)
    pooling = {"pooling_mode": "cls", "embedding_dimension": size}
    _write(directory / "1_Pooling", "config.json", pooling)
    for name, layer in bge_m3_heads(size, width).items():
        torch.save(layer, directory / f"{name}_linear.pt")
    return directory


def bge_m3_heads(hidden: int = 48, width: int = SIZE) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and biases, in float16, of the heads of `bge_m3`."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: {
            "weight": torch.randn(size, hidden, generator=generator).half() / 7,
            "bias": torch.randn(size, generator=generator).half() / 7,
        }
        for name, size in (("sparse", 1), ("colbert", width))
    }


@cache
def tagger(name: str = "bert") -> Path:
    """A model with classes for tokens."""
    directory = _root() / f"tagger-{name}"
    config = tiny_config(name)
    config.num_labels = len(LABELS)
    config.id2label = dict(enumerate(LABELS))
    save_model(AutoModelForTokenClassification.from_config, config, directory, name)
    return directory


@cache
def pages(query: str | None = None, page: str | None = None) -> Path:
    """A model of pages, whose processor has these texts in place of its own."""
    source = vision("qwen2_vl")
    directory = _copy(source, "pages")
    inside = AutoConfig.from_pretrained(source)
    config = ColQwen2Config(vlm_config=inside.to_dict(), embedding_dim=SIZE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = ColQwen2ForRetrieval(config)
    model.vlm.load_state_dict(AutoModel.from_pretrained(source).state_dict())
    model.save_pretrained(directory)
    _processor(directory, query, page).save_pretrained(directory)
    return directory


def processor_of(directory: Path) -> Any:
    """The processor of a model of pages."""
    said = json.loads((directory / "processor_config.json").read_text())
    return _processor(directory, said["query_prefix"], said["visual_prompt_prefix"])


def _processor(directory: Path, query: str | None, page: str | None) -> Any:
    return ColQwen2Processor(
        Qwen2VLImageProcessorPil.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory),
        query_prefix=query,
        visual_prompt_prefix=page,
    )


def projection() -> torch.Tensor:
    """Weights from states to vectors of tokens: [SIZE, 48]."""
    return torch.randn(SIZE, 48, generator=torch.Generator().manual_seed(5)) / 7


def _dense() -> dict[str, Any]:
    return {
        "in_features": 48,
        "out_features": SIZE,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }


def _with_mask(source: Path, name: str) -> Path:
    """A copy whose tokenizer says that it has a mask."""
    directory = _copy(source, name)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    _write(directory, path.name, config | {"mask_token": "[MASK]"})
    return directory


def _copy(source: Path, name: str) -> Path:
    directory = _root() / f"{name}-{len(list(_root().iterdir()))}"
    shutil.copytree(source, directory)
    return directory


def _modules(directory: Path, *modules: tuple[str, str, dict[str, Any] | None]) -> None:
    listed = []
    for index, (path, kind, config) in enumerate(modules):
        listed.append({"idx": index, "name": str(index), "path": path, "type": kind})
        if config is not None:
            _write(directory / path, "config.json", config)
    (directory / "modules.json").write_text(json.dumps(listed), encoding="utf-8")


def _write(directory: Path, name: str, value: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(json.dumps(value), encoding="utf-8")


@cache
def _root() -> Path:
    return scratch("output-models")
