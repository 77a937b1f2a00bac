"""Tiny decoders that score: by the logits of words, or by a head on the last state."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.embedding_models import save_model, tiny_config
from tests.scratch import scratch

NO, YES = "north", "south"
TEMPLATE = (
    "instruct {{ instruction | default('retrieve documents') }} query : {{ query }} "
    "passage : {{ document | trim }} answer"
)
"""As `--chat-template` takes it, with variables."""
TURNS = (
    "{%- set told = messages | selectattr('role', 'eq', 'system') | list -%}"
    "{%- macro of(role) -%}{{ messages | selectattr('role', 'eq', role) | map(attribute='content')"
    " | first }}{%- endmacro -%}"
    "instruct {{ told[0].content if told else 'retrieve documents' }} query : {{ of('query') }} "
    "passage : {{ of('document') }} answer"
)
"""As sentence-transformers saves it with a model, with turns; it writes the same."""


@cache
def words(name: str, *, said: bool = False) -> Path:
    """The directory of a decoder; `said` with the files by which it scores by YES and NO."""
    config = tiny_config(name)
    config.tie_word_embeddings = name == "qwen3"
    directory = _root() / f"words-{name}-{said}"
    save_model(AutoModelForCausalLM.from_config, config, directory, name)
    if said:
        ids = json.loads((directory / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
        _write(directory / "chat_template.jinja", TURNS)
        modules = [("", "base.modules.transformer.Transformer"),
                   ("1_LogitScore", "cross_encoder.modules.logit_score.LogitScore")]  # fmt: skip
        _json(
            directory / "modules.json",
            [
                {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.{kind}"}
                for n, (path, kind) in enumerate(modules)
            ],
        )
        _json(
            directory / "sentence_bert_config.json",
            {
                "transformer_task": "text-generation",
                "modality_config": {
                    "text": {"method": "forward", "method_output_name": "logits"},
                    "message": {
                        "method": "forward",
                        "method_output_name": "logits",
                        "format": "flat",
                    },
                },
                "module_output_name": "causal_logits",
            },
        )
        _json(directory / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
        _json(
            directory / "1_LogitScore" / "config.json",
            {"true_token_id": ids[YES], "false_token_id": ids[NO]},
        )
    return directory


def saved_words(
    directory: Path,
    *,
    one: bool = False,
    activation: str | None = None,
    instruction: str | None = None,
    **ids: int,
) -> Path:
    """Copy `words` with its files to `directory`.

    Args:
        directory: to be made.
        one: score the logit of YES alone.
        activation: name of a torch class, as CrossEncoder saves it.
        instruction: the default prompt that it saves.
        ids: of the config.json of LogitScore.
    """
    shutil.copytree(words("qwen3", said=True), directory)
    said: dict[str, Any] = {"model_type": "CrossEncoder"}
    if activation is not None:
        said["activation_fn"] = activation
    if instruction is not None:
        said |= {"prompts": {"task": instruction}, "default_prompt_name": "task"}
    _json(directory / "config_sentence_transformers.json", said)
    score = directory / "1_LogitScore" / "config.json"
    _json(score, json.loads(score.read_text("utf-8")) | ({"false_token_id": None} if one else ids))
    return directory


@cache
def headed(name: str, labels: int = 1) -> Path:
    """The directory of a decoder with a classification head."""
    config = tiny_config(name)
    config.num_labels = labels
    config.pad_token_id = 0
    directory = _root() / f"headed-{name}-{labels}"
    save_model(AutoModelForSequenceClassification.from_config, config, directory, name)
    return directory


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _json(path: Path, value: Any) -> None:
    _write(path, json.dumps(value))


@cache
def _root() -> Path:
    return scratch("scoring-models")
