"""The examples run, and do what they say."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from inlay import demo
from tests.adapters import make_prompt_tuning
from tests.commands import run
from tests.models import tiny
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


def example(name: str, *words: object) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), *map(str, words)],
        capture_output=True, text=True, timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem
)
def test_help_has_a_line_for_each_command(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = re.findall(r"^    (\S.*)$", ast.get_docstring(ast.parse(text)) or "", re.M)
    assert lines
    for line in lines:
        assert re.fullmatch(r"(inlay|python|pip) (?!.*\b(inlay|python|pip) ).*", line), line
    assert "RawDescriptionHelpFormatter" in text


def test_help_of_a_benchmark_is_its_docstring_as_it_is_written() -> None:
    text = (ROOT / "benchmarks" / "house.py").read_text(encoding="utf-8")
    told = ast.get_docstring(ast.parse(text))
    assert told is not None
    assert told in run(sys.executable, "-m", "benchmarks.house", "--help", cwd=ROOT)


def test_no_help_runs_a_docstring_together() -> None:
    for folder in ("benchmarks", "scripts", "tests/fuzz"):
        for path in (ROOT / folder).glob("*.py"):
            text = path.read_text(encoding="utf-8")
            formatted = text.count("formatter_class=argparse.Raw")
            assert text.count("description=__doc__") <= formatted, path


@pytest.mark.slow
def test_notes_that_are_retrieved_by_vectors_and_sent_as_rows_are_answered_from(
    servers: tuple[Served, Served],
) -> None:
    answering, finding = servers
    said = example("retrieval", "--base-url", answering.v1, "--embedding-url", finding.v1)
    assert "Where is the key?  <- " in said
    assert int(said.splitlines()[-1].split()[0]) >= 4, said


@pytest.mark.slow
def test_langchain_finds_and_asks_the_same(servers: tuple[Served, Served]) -> None:
    pytest.importorskip("langchain_openai")
    answering, finding = servers
    said = example("langchain_retrieval", "--base-url", answering.v1, "--embedding-url", finding.v1)
    assert int(said.splitlines()[-1].split()[0]) >= 4, said


@pytest.fixture(scope="module")
def base() -> Iterator[Served]:
    with serving(
        tiny("gemma3_text"), "--served-model-name", "base", "--enable-prompt-embeds"
    ) as served:
        yield served


@pytest.mark.slow
def test_rows_are_trained_uploaded_and_asked_beside_those_of_another_task(
    base: Served, tmp_path: Path
) -> None:
    # `tests/published` shows that they learn; here a label can be told from a text's first letter.
    for task, labels in (("letter", "ac"), ("sign", "nt")):
        lines = [f"{label}{number} {label},{label}" for label in labels for number in range(40)]
        (tmp_path / f"{task}.csv").write_text("\n".join(lines), encoding="utf-8")
        said = example(
            "eight_rows", "train", tiny("gemma3_text"), "--task", task, "--csv", tmp_path / f"{task}.csv",
            "--steps", 3, "--out", tmp_path / task,
        )  # fmt: skip
        assert f"{task}: 30 to learn from, 50 held out" in said
        assert "8 rows of" in said
    said = example(
        "eight_rows", "ask", tmp_path / "letter", tmp_path / "sign", "--base-url", base.v1,
        "--model", "base", "--most", 4,
    )  # fmt: skip
    refs = re.findall(r"uploaded once, now '(pe-\w{32})'", said)
    assert len(refs) == len(set(refs)) == 2
    lines = [line for line in said.splitlines() if "texts seen" in line]
    assert [line.split()[0] for line in lines] == ["letter"] * 4 + ["sign"] * 4
    rows = [line for line in lines if "8 rows, 24 texts seen" in line]
    assert len(rows) == 2
    assert all(" of 4 " in line for line in lines)


@pytest.mark.slow
def test_a_prompt_that_peft_trained_gives_the_token_that_peft_gives(
    base: Served, tmp_path: Path
) -> None:
    make_prompt_tuning(tmp_path / "adapter", tiny("gemma3_text"))
    texts = ("a text", "another", "1 2 3")
    said = example(
        "peft_prompt", tiny("gemma3_text"), tmp_path / "adapter", *texts, "--base-url", base.v1
    )
    assert "rows: pe-" in said
    assert said.splitlines()[-1] == "3 of 3 the same"
