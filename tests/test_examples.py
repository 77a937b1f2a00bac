"""The examples run, and do what they say."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from inlay import demo
from tests.serving import Served, serving

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def bag_of_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT without layers over the words of the notes.

    Texts are near each other that share words.
    """
    directory = tmp_path_factory.mktemp("words")
    text = " ".join(f"{note.document} {note.after}" for note in demo.examples().mixed).lower()
    words = sorted(set(re.findall(r"\w+", text)) - {"the", "of", "is", "a", "does", "what"})
    vocabulary = directory / "vocab.txt"
    vocabulary.write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]), encoding="utf-8"
    )
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(words) + 5, hidden_size=128, num_hidden_layers=0, num_attention_heads=2
    )
    model = BertModel(config)
    with torch.no_grad():
        model.embeddings.position_embeddings.weight.zero_()
        model.embeddings.token_type_embeddings.weight.zero_()
        model.embeddings.word_embeddings.weight[:5] = 0
    model.save_pretrained(directory)
    BertTokenizerFast(str(vocabulary)).save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 512}))
    return directory


@pytest.fixture(scope="module")
def servers(bag_of_words: Path) -> Iterator[tuple[Served, Served]]:
    with (
        serving(command="demo") as answering,
        serving(bag_of_words, "--task", "embed", "--served-model-name", "minilm") as finding,
    ):
        yield answering, finding


@pytest.mark.slow
def test_notes_that_are_retrieved_by_vectors_and_sent_as_rows_are_answered_from(
    servers: tuple[Served, Served],
) -> None:
    answering, finding = servers
    run = subprocess.run(
        [
            sys.executable, str(ROOT / "examples" / "retrieval.py"),
            "--base-url", answering.v1, "--embedding-url", finding.v1,
        ],
        check=True, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert "Where is the key?  <- " in run.stdout
    last = run.stdout.splitlines()[-1]
    assert int(last.split()[0]) >= 4, run.stdout
