"""Decoders that score: by words or by a head, with pairs as a template writes them."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from inlay.base.errors import InvalidRequestError
from inlay.embedding.config import EmbeddingConfig
from inlay.engine.embed.facts import check_task
from inlay.engine.embed.families import FAMILIES
from inlay.tensors.checkpoint import config_of
from tests import scoring_models as models
from tests.embedding_models import MAX_LENGTH
from tests.embedding_reference import embedded
from tests.live import fleet
from tests.payloads import saved

QUERY = "how many ships"
DOCUMENTS = ["the harbour counts ships every night", "cold wind", "ships sail south " * 3]


@cache
def _tokenizer(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path)


@cache
def _model(path: Path, kind: Any) -> Any:
    return kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def written(document: str, instruction: str = "retrieve documents", query: str = QUERY) -> str:
    return f"instruct {instruction} query : {query} passage : {document.strip()} answer"


@torch.no_grad()
def log_odds(path: Path, text: str) -> float:
    """The difference of the words' logits, by the whole matrix of logits."""
    tokenizer = _tokenizer(path)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    logits = _model(path, AutoModelForCausalLM)(inputs.input_ids).logits[0, -1]
    no, yes = tokenizer.convert_tokens_to_ids([models.NO, models.YES])
    return float(logits[yes] - logits[no])


def sigmoid(value: float) -> float:
    return 1 / (1 + float(np.exp(-value)))


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def path(request: pytest.FixtureRequest) -> Path:
    return models.words(request.param)


@pytest.fixture(scope="module")
def url(path: Path) -> Iterator[str]:
    with fleet(path, task="score", score_tokens=[models.NO, models.YES]) as running:
        yield running.serve(chat_template=models.TEMPLATE)


def scored(url: str, documents: list[str] = DOCUMENTS, **body: Any) -> list[float]:
    asked = {"text_1": QUERY, "text_2": documents, **body}
    response = httpx.post(url + "/v1/score", json=asked, timeout=180)
    assert response.status_code == 200, response.text
    return [item["score"] for item in response.json()["data"]]


def refusal(url: str, path: str = "/v1/score", **body: Any) -> tuple[str, str]:
    asked = {"text_1": QUERY, "text_2": DOCUMENTS, **body}
    response = httpx.post(url + path, json=asked, timeout=180)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def test_a_score_is_the_softmax_of_two_words_of_the_next_token(url: str, path: Path) -> None:
    wanted = [log_odds(path, written(each)) for each in DOCUMENTS]
    assert scored(url) == pytest.approx([sigmoid(each) for each in wanted], abs=1e-5)
    assert scored(url, use_activation=False) == pytest.approx(wanted, abs=1e-4)
    body = {"query": QUERY, "documents": DOCUMENTS}
    ranked = httpx.post(url + "/v1/rerank", json=body, timeout=180).json()["results"]
    assert [each["index"] for each in ranked] == np.argsort(wanted)[::-1].tolist()


def test_an_instruction_is_a_variable_of_the_template(url: str, path: Path) -> None:
    wanted = [log_odds(path, written(each, "question answer")) for each in DOCUMENTS]
    found = scored(url, instruction="question answer", use_activation=False)
    assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("keep", [20, 23, -1])
def test_a_document_is_cut_and_the_suffix_never(url: str, path: Path, keep: int) -> None:
    long = "ships sail south and " * 40
    limit = MAX_LENGTH if keep == -1 else keep
    around = len(_tokenizer(path)(written(""), add_special_tokens=False).input_ids)
    kept = " ".join(long.split()[: limit - around])
    assert len(_tokenizer(path)(written(kept), add_special_tokens=False).input_ids) == limit
    found = scored(url, [long], truncate_prompt_tokens=keep, use_activation=False)
    assert found == pytest.approx([log_odds(path, written(kept))], abs=1e-4)
    clipped = scored(url, [long], max_tokens_per_doc=3, use_activation=False)
    assert clipped == pytest.approx([log_odds(path, written("ships sail south"))], abs=1e-4)


def test_what_a_template_cannot_take_is_refused_by_name(url: str) -> None:
    param, message = refusal(url, text_2=["ships " * 400])
    assert param == "text_2[0]"
    assert "maximum context length" in message
    param, message = refusal(url, text_1="ships " * 30, truncate_prompt_tokens=20)
    assert "only its document is cut" in message
    param, message = refusal(url, truncation_side="left", truncate_prompt_tokens=20)
    assert param == "truncation_side"
    param, message = refusal(url, text_2=[{"content": []}])
    assert (param, "reads pairs" in message) == ("text_2[0]", True)


def test_the_routes_of_tei_name_their_own_fields_and_refuse_pairs_in_a_template(url: str) -> None:
    def said(path: str, **body: Any) -> str:
        response = httpx.post(url + path, json=body, timeout=180)
        assert response.status_code == 400, response.text
        return str(response.json()["error"])

    asked = {"query": QUERY, "texts": DOCUMENTS}
    left = said("/rerank", **asked, truncation_direction="Left")
    assert left.startswith("truncation_direction may only be right")
    own = said("/rerank", **asked, truncate_prompt_tokens=-5)
    assert own.startswith("truncate_prompt_tokens must be")
    pair = said("/predict", inputs=[["a"], ["a", "b"]])
    assert pair.startswith("inputs[1] is a pair; the model `tiny` reads pairs in a template")


def test_the_files_of_sentence_transformers_say_words_and_template() -> None:
    path = models.words("qwen3", said=True)
    with fleet(path, task="auto") as running:
        url = running.serve()
        told: dict[str, Any] = {}
        for instruction in ("retrieve documents", "z x"):
            wanted = [sigmoid(log_odds(path, written(each, instruction))) for each in DOCUMENTS]
            assert scored(url, **told) == pytest.approx(wanted, abs=1e-5)
            told = {"instruction": "z x"}


@torch.no_grad()
def logit_of_yes(path: Path, text: str) -> float:
    tokenizer = _tokenizer(path)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    logits = _model(path, AutoModelForCausalLM)(inputs.input_ids).logits[0, -1]
    return float(logits[tokenizer.convert_tokens_to_ids(models.YES)])


def test_the_files_say_activation_and_instruction_of_a_score(tmp_path: Path) -> None:
    one = models.saved_words(tmp_path / "one", one=True, instruction="z x")
    with fleet(one, task="auto") as running:
        url = running.serve()
        logits = [logit_of_yes(one, written(each, "z x")) for each in DOCUMENTS]
        assert scored(url) == pytest.approx([sigmoid(each) for each in logits], abs=1e-5)
        # An empty one is none, a given one is in place of that of the files.
        for told, said in (("", "retrieve documents"), ("wind", "wind")):
            logits = [logit_of_yes(one, written(each, said)) for each in DOCUMENTS]
            found = scored(url, instruction=told, use_activation=False)
            assert found == pytest.approx(logits, abs=1e-4)
        # A template without a place for one is served without.
        bare = running.serve(chat_template="{{ query }} {{ document }}")
        logits = [logit_of_yes(one, f"{QUERY} {each}") for each in DOCUMENTS]
        assert scored(bare, use_activation=False) == pytest.approx(logits, abs=1e-4)
    two = models.saved_words(tmp_path / "two", activation="torch.nn.modules.linear.Identity")
    with fleet(two, task="auto") as running:
        wanted = [log_odds(two, written(each)) for each in DOCUMENTS]
        assert scored(running.serve()) == pytest.approx(wanted, abs=1e-4)


def test_a_logit_of_one_word_given_by_hand_stays_one() -> None:
    path = models.words("qwen3")
    with fleet(path, task="score", score_tokens=[models.YES]) as running:
        found = scored(running.serve(chat_template=models.TEMPLATE))
    wanted = [logit_of_yes(path, written(each)) for each in DOCUMENTS]
    assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "gemma"])
def test_a_decoders_head_reads_the_last_state_of_text_and_of_rows(name: str) -> None:
    path = models.headed(name)
    tokenizer = _tokenizer(path)
    model = _model(path, AutoModelForSequenceClassification)

    def logit(text: str, *, special: bool) -> float:
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=special)
        with torch.no_grad():
            return float(model(inputs.input_ids).logits[0, 0])

    with fleet(path, task="score") as running:
        url = running.serve(chat_template=models.TEMPLATE, enable_prompt_embeds=True)
        wanted = [logit(written(each), special=False) for each in DOCUMENTS]
        assert scored(url, use_activation=False) == pytest.approx(wanted, abs=1e-4)
        rows = saved(torch.from_numpy(embedded(path, tokenizer(QUERY).input_ids).copy()))
        for body in ({"input": QUERY}, {"prompt_embeds": rows}):
            asked = {**body, "use_activation": False}
            answer = httpx.post(url + "/classify", json=asked, timeout=180).json()
            (probs,) = (each["probs"] for each in answer["data"])
            assert probs == pytest.approx([logit(QUERY, special=True)], abs=1e-4)


def test_without_a_template_nothing_is_scored() -> None:
    with fleet(models.headed("qwen3"), task="score") as running:
        param, message = refusal(running.serve())
        assert "--chat-template" in message
        twice = "{{ query }} {{ document }} {{ document }}"
        param, message = refusal(running.serve(chat_template=twice))
        assert "writes a document 2 times" in message
        none = "{{ query }} {{ document }}"
        param, message = refusal(running.serve(chat_template=none), instruction="x")
        assert param == "instruction"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task": "score", "score_tokens": ["north wind"]}, "is 2 tokens"),
        ({"task": "score", "score_tokens": ["x", "y", "z"]}, "one token or two"),
        ({"task": "embed", "score_tokens": ["x"]}, "allowed with --task score"),
        ({"task": "generate", "score_tokens": ["x"]}, "allowed with --task score"),
        ({"task": "score", "score_tokens": ["x", "x"]}, "two that differ, from 0 to 48"),
        ({"task": "score"}, "--score-tokens no,yes"),
    ],
)
def test_words_that_no_model_scores_by_are_refused_at_the_start(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words), fleet(models.words("qwen3"), **options):
        pass


@pytest.mark.parametrize(
    "ids",
    [{"true_token_id": 10**9}, {"false_token_id": -5}, {"true_token_id": 7, "false_token_id": 7}],
)
def test_ids_that_are_no_two_words_are_refused_at_the_start(
    tmp_path: Path, ids: dict[str, Any]
) -> None:
    path = models.saved_words(tmp_path / "model", **ids)
    with pytest.raises(InvalidRequestError) as refused, fleet(path, task="score"):
        pass
    assert "two that differ, from 0 to 48" in str(refused.value)
    assert all(str(id_) in str(refused.value) for id_ in ids.values())


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_the_task_or_engine_that_scores_is_named(engine: str) -> None:
    said = models.words("qwen3", said=True)
    stored, config = config_of(said), EmbeddingConfig.read(said)
    family, decoders = FAMILIES["qwen3"], engine == "torch"
    with pytest.raises(InvalidRequestError, match="start it with --task score"):
        check_task(stored, family, "embed", config.outputs, decoders=decoders)
    head = {"architectures": ["Qwen3ForSequenceClassification"]}
    if decoders:
        check_task(stored, family, "score", config.outputs, decoders=True)
        check_task(head, family, "score", (), decoders=True)
        return
    with pytest.raises(InvalidRequestError, match="by the torch engine"):
        check_task(stored, family, "score", config.outputs)
    with pytest.raises(
        InvalidRequestError, match="head of a decoder is served by the torch engine"
    ):
        check_task(head, family, "score", ())
