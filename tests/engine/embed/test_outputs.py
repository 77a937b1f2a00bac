"""Outputs of one pass are those of plain transformers, in any batch and with any others."""

import gc
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, AutoModelForTokenClassification

from inlay.api.generation.truncation import Truncation
from inlay.api.openai.embeddings.gathering import Gathered
from inlay.api.openai.embeddings.inputs import InputPiece, TextInputs
from inlay.api.openai.embeddings.outputs import rows_of
from inlay.api.openai.embeddings.roles import part_of
from inlay.base.errors import InvalidRequestError
from inlay.embedding.cache import Bundle
from inlay.engine.embed import outputs
from inlay.engine.embed.encoder import Encoder
from inlay.engine.embed.pooling import Dense
from inlay.engine.embed.vector_model import EmbedInput
from inlay.engine.settings import EngineSettings
from inlay.messages.pooling import CHUNKS
from inlay.messages.prompt import Prompt, Tokens
from inlay.render import Renderer
from tests import embedding_reference as reference
from tests import output_models as models
from tests.embedding_models import tiny_embedding

TEXTS = (
    "how many ships sail south",
    "the harbour : counts : its lanterns every night and writes the number in a book",
    "cold",
    "unknownword cold",
    "hello world : " * 30,
)
Array = npt.NDArray[Any]


@cache
def encoder(path: Path, *names: str) -> Encoder:
    settings = {"model": str(path), "task": "embed", "outputs": list(names)}
    return Encoder.load(EngineSettings.of(**settings))


def asked(text: str, path: Path, *names: str, most: int = 0) -> EmbedInput:
    ids = reference.tokenizer_of(path)(text, truncation=True)["input_ids"]
    return EmbedInput(Prompt.of(Tokens(ids)), len(ids), outputs=names, max_active=most)


def whole(bundle: Bundle, size: int) -> Array:
    found = np.zeros(size, np.float32)
    found[bundle["sparse.indices"]] = bundle["sparse.values"]
    return found


@torch.no_grad()
def splade_weights(path: Path, text: str, *, sums: bool, twice: bool) -> Array:
    """What SPLADE's papers say, of all logits at once."""
    model = AutoModelForMaskedLM.from_pretrained(path).eval()
    ids = reference.tokenizer_of(path)(text, truncation=True, return_tensors="pt")["input_ids"]
    weights = model(input_ids=ids).logits[0].relu().log1p()
    weights = weights.log1p() if twice else weights
    found: Array = (weights.sum(0) if sums else weights.amax(0)).numpy()
    return found


@pytest.mark.parametrize("tile", [7, 4096])
@pytest.mark.parametrize(
    ("strategy", "activation"), [("max", "relu"), ("sum", "relu"), ("max", "log1p_relu")]
)
def test_sparse_weights_are_those_of_all_logits_at_once(
    monkeypatch: pytest.MonkeyPatch, strategy: str, activation: str, tile: int
) -> None:
    monkeypatch.setattr(outputs, "TILE", tile)
    path = models.splade("bert", strategy, activation)
    found = encoder(path).outputs([asked(text, path) for text in TEXTS])
    for text, bundle in zip(TEXTS, found, strict=True):
        expected = splade_weights(
            path, text, sums=strategy == "sum", twice=activation == "log1p_relu"
        )
        assert np.allclose(whole(bundle, len(expected)), expected, atol=1e-5)
        assert (np.diff(bundle["sparse.indices"]) > 0).all()
        assert bundle["sparse.values"].all()


@pytest.mark.parametrize(
    "name",
    ["roberta", "xlm-roberta", "camembert", "electra", "distilbert", "modernbert", "mpnet"],
)
def test_every_family_with_masked_words_gives_sparse_weights(name: str) -> None:
    path = models.splade(name)
    found = encoder(path).outputs([asked(text, path) for text in TEXTS])
    for text, bundle in zip(TEXTS, found, strict=True):
        expected = splade_weights(path, text, sums=False, twice=False)
        assert np.allclose(whole(bundle, len(expected)), expected, atol=1e-4)


def test_the_largest_weights_are_kept_where_fewer_are_wanted() -> None:
    path = models.splade()
    (every,) = encoder(path).outputs([asked(TEXTS[1], path)])
    (some,) = encoder(path).outputs([asked(TEXTS[1], path, most=5)])
    best = np.sort(np.argsort(-every["sparse.values"])[:5])
    assert some["sparse.indices"].tolist() == every["sparse.indices"][best].tolist()
    assert some["sparse.values"].tolist() == every["sparse.values"][best].tolist()


def test_a_bare_masked_language_model_embeds_and_says_that_it_may_be_splade(
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = models.masked()
    found = Encoder.load(EngineSettings.of(model=str(path), task="embed"))
    assert [each.name for each in found.card.outputs] == ["dense", "tokens", "sparse"]
    assert caplog.text.count("--outputs sparse") == 1
    assert [each.name for each in encoder(path, "sparse").card.outputs] == ["sparse"]
    with pytest.raises(InvalidRequestError, match=r"dense, tokens, sparse; --outputs names 'lab"):
        encoder(path, "labels")


def test_the_layers_behind_a_mean_are_kept_once() -> None:
    def kept() -> int:
        gc.collect()
        return sum(isinstance(each, Dense) for each in gc.get_objects())

    before = kept()
    settings = EngineSettings.of(model=str(tiny_embedding("gemma")), task="embed")
    found = Encoder.load(settings)
    assert kept() - before == 2
    assert CHUNKS not in [each.name for each in found.card.outputs]


def test_an_embedder_that_lost_the_head_of_its_architecture_is_served_as_before(
    tmp_path: Path,
) -> None:
    path = tmp_path / "headless"
    shutil.copytree(models.masked(), path)
    weights = load_file(path / "model.safetensors")
    body = {name: tensor for name, tensor in weights.items() if not name.startswith("cls.")}
    save_file(body, path / "model.safetensors", {"format": "pt"})
    found = encoder(path)
    assert [each.name for each in found.card.outputs] == ["dense", "tokens"]
    (bundle,) = found.outputs([asked(TEXTS[0], path)])
    assert np.allclose(
        bundle["dense"], encoder(models.masked()).outputs([asked(TEXTS[0], path)])[0]["dense"]
    )


@torch.no_grad()
def test_tokens_of_a_dense_model_are_its_last_states() -> None:
    path = tiny_embedding("bert")
    found = encoder(path).outputs([asked(text, path, "tokens") for text in TEXTS])
    for text, bundle in zip(TEXTS, found, strict=True):
        ids = reference.tokenizer_of(path)(text, truncation=True, return_tensors="pt")["input_ids"]
        states = reference.model_of(path)(input_ids=ids).last_hidden_state[0].numpy()
        assert np.allclose(bundle["tokens"], states, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "modernbert", "distilbert"])
def test_classes_of_tokens_are_those_of_transformers(name: str) -> None:
    path = models.tagger(name)
    model = AutoModelForTokenClassification.from_pretrained(path).eval()
    found = encoder(path).outputs([asked(text, path) for text in TEXTS])
    for text, bundle in zip(TEXTS, found, strict=True):
        ids = reference.tokenizer_of(path)(text, truncation=True, return_tensors="pt")["input_ids"]
        assert np.allclose(bundle["token_labels"], model(input_ids=ids).logits[0], atol=1e-4)
    assert encoder(path).card.outputs[0].labels == models.LABELS


@torch.no_grad()
def test_the_three_outputs_of_bge_m3_are_the_formulas_of_its_code() -> None:
    path = models.bge_m3()
    names = ("dense", "sparse", "tokens")
    found = encoder(path).outputs([asked(text, path, *names) for text in TEXTS])
    heads = models.bge_m3_heads().values()
    sparse, colbert = ({key: value.float() for key, value in head.items()} for head in heads)
    tokenizer = reference.tokenizer_of(path)
    unused = {tokenizer.cls_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    for text, bundle in zip(TEXTS, found, strict=True):
        ids = tokenizer(text, truncation=True, return_tensors="pt")["input_ids"]
        states = reference.model_of(path)(input_ids=ids).last_hidden_state[0]
        assert np.allclose(bundle["dense"], states[0], atol=1e-5)
        weights = (states @ sparse["weight"].T + sparse["bias"]).relu()[:, 0]
        expected: dict[int, float] = {}
        for token, weight in zip(ids[0].tolist(), weights.tolist(), strict=True):
            if token not in unused and weight > 0:
                expected[token] = max(weight, expected.get(token, 0.0))
        assert bundle["sparse.indices"].tolist() == sorted(expected)
        values = [expected[token] for token in sorted(expected)]
        assert np.allclose(bundle["sparse.values"], values, atol=1e-5)
        vectors = states @ colbert["weight"].T + colbert["bias"]
        piece = InputPiece(Prompt.of(Tokens(ids[0].tolist())))
        card = encoder(path).card
        rows = rows_of(Gathered(piece, bundle), card.output("tokens", "m"), card, None)
        assert rows.positions.tolist() == list(range(1, len(ids[0])))
        unit = torch.nn.functional.normalize(vectors[1:], dim=-1)
        assert np.allclose(rows.values, unit, atol=1e-5)


def test_what_an_output_is_does_not_depend_on_others_or_on_the_batch() -> None:
    path = models.bge_m3()
    model, names = encoder(path), ("dense", "sparse", "tokens")
    together = model.outputs([asked(text, path, *names) for text in TEXTS])
    mixed = model.outputs([asked(text, path, names[n % 3]) for n, text in enumerate(TEXTS)])
    for number, (text, bundle, some) in enumerate(zip(TEXTS, together, mixed, strict=True)):
        assert {key.partition(".")[0] for key in some} == {names[number % 3]}
        alone: dict[str, Any] = {}
        for name in names:
            alone |= model.outputs([asked(text, path, name)])[0]
        for key, array in bundle.items():
            assert np.allclose(alone[key], array, atol=1e-5)
        for key, array in some.items():
            assert np.allclose(bundle[key], array, atol=1e-5)


def pieces(model: Encoder, role: str, texts: tuple[str, ...] = TEXTS) -> list[InputPiece]:
    part = part_of({"role": role}, model.card, "m")
    cut = Truncation.of(-1, "right", model.max_model_len)
    form = model.card.roles.get(role)
    inputs = TextInputs(
        texts, Renderer.load(model.path), cut, prefixes=(part.prefix,), form=form, ranges=True
    )
    return inputs.pieces(0, len(texts))


def given(piece: InputPiece) -> EmbedInput:
    return EmbedInput(piece.prompt, len(piece.prompt), visible=piece.visible)


@torch.no_grad()
@pytest.mark.parametrize(
    ("path", "attend"),
    [
        (models.stanford, False),
        (lambda: models.stanford(attend=True), True),
        (lambda: models.pylate(attend=False), False),
        (models.pylate, True),
    ],
)
def test_queries_have_a_marker_and_masks_that_others_see_or_do_not(path: Any, attend: bool) -> None:
    directory = path()
    model = encoder(directory)
    tokenizer = reference.tokenizer_of(directory)
    words = tokenizer.get_vocab()
    found = pieces(model, "query")
    bundles = model.outputs([given(piece) for piece in found])
    for text, piece, bundle in zip(TEXTS, found, bundles, strict=True):
        own = tokenizer(text, add_special_tokens=False)["input_ids"][: models.QUERY_LENGTH - 3]
        ids = [words["[CLS]"], words["query"], *own, words["[SEP]"]]
        masks = models.QUERY_LENGTH - len(ids)
        assert piece.prompt.token_ids() == (*ids, *[words["[MASK]"]] * masks)
        seen = torch.ones(1, models.QUERY_LENGTH, dtype=torch.long)
        seen[0, len(ids) :] = int(attend)
        states = reference.model_of(directory)(
            input_ids=torch.tensor([piece.prompt.token_ids()]), attention_mask=seen
        ).last_hidden_state[0]
        expected = states @ models.projection().T
        assert np.allclose(bundle["tokens"], expected, atol=1e-5)


def test_masks_that_others_do_not_see_leave_their_vectors_as_they_are() -> None:
    model = encoder(models.stanford())
    (piece,) = pieces(model, "query", TEXTS[:1])
    assert piece.visible is not None
    (filled,) = model.outputs([given(piece)])
    bare = Prompt.of(Tokens(piece.prompt.token_ids()[: piece.visible]))
    (alone,) = model.outputs([EmbedInput(bare, len(bare))])
    assert np.allclose(filled["tokens"][: piece.visible], alone["tokens"], atol=1e-5)
    ((other,),) = [pieces(model, "query", ("cold wind",))]
    assert not np.allclose(
        model.outputs([given(other)])[0]["tokens"][-1], filled["tokens"][-1], atol=1e-3
    )


def test_documents_leave_out_punctuation_and_never_unknown_words() -> None:
    for path in (models.stanford(), models.pylate(), models.multi_vector()):
        model = encoder(path)
        card, words = model.card, reference.tokenizer_of(path).get_vocab()
        for text, piece in zip(TEXTS, pieces(model, "document"), strict=True):
            ids = piece.prompt.token_ids()
            assert ids[1] == words["passage"]
            assert len(ids) <= models.DOCUMENT_LENGTH
            (bundle,) = model.outputs([given(piece)])
            rows = rows_of(Gathered(piece, bundle), card.outputs[0], card, "document")
            left = [place for place, token in enumerate(ids) if token != words[":"]]
            assert rows.positions.tolist() == left
            assert piece.truncated == (text == TEXTS[-1])
            if "unknownword" in text:
                assert words["[UNK]"] in ids
                assert ids.index(words["[UNK]"]) in rows.positions


def test_longer_queries_are_cut_or_not_as_the_model_says() -> None:
    fixed, least = (pieces(encoder(models.multi_vector(how)), "query") for how in ("fixed", "min"))
    assert {len(piece.prompt) for piece in fixed} == {models.QUERY_LENGTH}
    assert [piece.truncated for piece in fixed] == [False, True, False, False, True]
    assert len(least[-1].prompt) > models.QUERY_LENGTH


def test_ranges_are_the_characters_of_the_text_without_what_was_put_before_it() -> None:
    model = encoder(models.multi_vector())
    for text, piece in zip(TEXTS, pieces(model, "query"), strict=True):
        assert piece.ranges is not None
        assert len(piece.ranges) == len(piece.prompt)
        tokenizer = reference.tokenizer_of(models.multi_vector())
        for token, each in zip(piece.prompt.token_ids(), piece.ranges, strict=True):
            if each is not None:
                word = text[each[0] : each[1]]
                assert tokenizer(word, add_special_tokens=False)["input_ids"] == [token]
        covered = " ".join(text[each[0] : each[1]] for each in piece.ranges if each is not None)
        assert " ".join(text.split()).startswith(covered)


def test_a_module_that_is_not_known_is_refused_and_so_is_a_projection_elsewhere(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    for kinds, configs in (
        (["Transformer", "Pooling", "WeightedLayerPooling"], {}),
        (["Transformer", "SpladePooling", "Normalize"], {}),
        (["Transformer", "Pooling", "Dense"], {"2_Dense": {"module_input_name": "scores"}}),
        (["Router"], {}),
    ):
        listed = [
            {"type": f"m.{kind}", "path": f"{n}_{kind}" if n else ""}
            for n, kind in enumerate(kinds)
        ]
        (tmp_path / "modules.json").write_text(json.dumps(listed))
        for name, config in configs.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "config.json").write_text(json.dumps(config))
        with pytest.raises(InvalidRequestError, match="is made of"):
            Encoder.load(EngineSettings.of(model=str(tmp_path), task="embed"))
