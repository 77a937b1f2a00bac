"""The task of a model that was started without one."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inlay.base.errors import InvalidRequestError
from inlay.embedding.config import EmbeddingConfig
from inlay.embedding.plan import OutputPlan
from inlay.engine import EngineSettings
from inlay.engine.embed.facts import card_of
from inlay.engine.task import task_of, with_task
from inlay.engine.torch.weights.families import family_of

HEAD = OutputPlan("labels", source="classes", select=("cls",))


def directory(root: Path, *architectures: str, modules: bool = False) -> Path:
    root.mkdir(exist_ok=True)
    config = {"architectures": list(architectures)} if architectures else {}
    (root / "config.json").write_text(json.dumps(config))
    if modules:
        (root / "modules.json").write_text("[]")
    return root


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("LlamaForCausalLM", "generate"),
        ("GPT2LMHeadModel", "generate"),
        ("Qwen2_5_VLForConditionalGeneration", "generate"),
        ("BertModel", "embed"),
        ("MistralModel", "embed"),
        ("BertForMaskedLM", "embed"),
        ("BertForPreTraining", "embed"),
        ("RobertaForSequenceClassification", "score"),
        ("BertForTokenClassification", "embed"),
        ("HF_ColBERT", "embed"),
        ("BertForQuestionAnswering", "generate"),
    ],
)
def test_the_architecture_says_what_a_model_does(
    tmp_path: Path, architecture: str, task: str
) -> None:
    assert task_of(directory(tmp_path, architecture))[0] == task


def test_files_of_sentence_transformers_make_a_decoder_embed(tmp_path: Path) -> None:
    assert task_of(directory(tmp_path, "Qwen3ForCausalLM", modules=True))[0] == "embed"
    cross = directory(tmp_path / "cross", "BertForSequenceClassification", modules=True)
    assert task_of(cross)[0] == "score"
    assert task_of(directory(tmp_path / "bare")) == ("generate", "its architecture is not named")


def test_the_log_says_what_was_chosen_and_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = str(directory(tmp_path, "BertModel"))
    with caplog.at_level(logging.INFO):
        assert with_task(EngineSettings.of(model=model)).model.task == "embed"
    assert caplog.messages == ["serving with --task embed: its architecture is BertModel"]
    for task in ("generate", "score"):
        assert with_task(EngineSettings.of(model=model, task=task)).model.task == task
    assert with_task(EngineSettings.of(model="anything", engine="echo")).model.task == "generate"
    assert len(caplog.messages) == 1


def test_a_model_that_cannot_generate_is_refused_with_the_task_it_can_do() -> None:
    with pytest.raises(InvalidRequestError, match="do not generate text; --task embed"):
        family_of({"model_type": "bert", "architectures": ["BertForTokenClassification"]})


@pytest.mark.parametrize(
    ("fields", "labels", "activation"),
    [
        ({}, 1, "sigmoid"),
        ({}, 3, "softmax"),
        ({"problem_type": "regression"}, 1, "identity"),
        ({"problem_type": "multi_label_classification"}, 3, "sigmoid"),
        ({"problem_type": "single_label_classification"}, 2, "softmax"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            1,
            "identity",
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            2,
            "softmax",
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Softmax"},
            2,
            "softmax",
        ),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, 1, "tanh"),
    ],
)
def test_logits_become_what_vllm_makes_of_them(
    tmp_path: Path, fields: dict[str, Any], labels: int, activation: str
) -> None:
    directory(tmp_path, "BertForSequenceClassification")
    names = {index: f"class {index}" for index in range(labels)}
    model = SimpleNamespace(num_labels=labels, id2label=names, name_or_path="m", **fields)
    settings = EngineSettings.of(model="m", task="score")
    card = card_of(settings, EmbeddingConfig.read(tmp_path), model, [HEAD])
    assert (card.activation, card.labels) == (activation, tuple(names.values()))


def test_an_activation_that_no_score_can_have_is_refused_when_it_is_loaded(
    tmp_path: Path,
) -> None:
    directory(tmp_path, "BertForSequenceClassification")
    named = {"activation_fn": "torch.nn.modules.activation.ReLU"}
    model = SimpleNamespace(
        num_labels=1, id2label={}, name_or_path="m", sentence_transformers=named
    )
    settings = EngineSettings.of(model="m", task="score")
    with pytest.raises(InvalidRequestError, match="ReLU, which is not served"):
        card_of(settings, EmbeddingConfig.read(tmp_path), model, [HEAD])
