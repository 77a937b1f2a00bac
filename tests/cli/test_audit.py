"""`inlay embeds audit`: texts of the demo, the gate, and input that makes no sense."""

import json
from pathlib import Path

import pytest
from scripts.demo_training.audit_texts import lines
from scripts.demo_training.world import build_world

from inlay import demo
from inlay.cli import main


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit") / "texts.jsonl"
    path.write_text("\n".join(lines(build_world(7), 71, 120)), encoding="utf-8")
    return path


def audit(texts: Path, *words: str) -> int:
    model = str(demo.model_dir())
    return main(["embeds", "audit", "--model", model, "--texts", str(texts), *words], {})


FAST = ("--attackers", "nearest", "--attackers", "signature", "--transform", "rotate")


def test_a_rotation_of_the_demo_is_read_by_norms_and_template(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(texts, *FAST, "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["texts"], found["public_texts"]) == (40, 80)
    (rotated,) = found["transforms"]
    read = {each["attacker"]: each["shares"]["tokens"]["value"] for each in rotated["attackers"]}
    assert list(read) == ["prior", "nearest", "signature"]
    assert read["nearest"] < 0.05
    assert read["signature"] >= 0.99
    assert rotated["worst"]["names"]["attacker"] == "signature"
    sample = rotated["samples"][0]
    assert sample["text"] == sample["read"]


def test_the_gate_fails_where_more_can_be_read_and_says_what(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(texts, *FAST, "--fail-above", "names=0.05") == 1
    said = capsys.readouterr()
    assert "transform rotate" in said.out
    assert (
        "rotate: names: up to 100.0 % can be read (most by signature), allowed: 5.0 %" in said.err
    )
    assert audit(texts, *FAST, "--fail-above", "tokens=1") == 0


def test_a_plain_file_has_a_text_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"The {index} cats of Mora sleep.\n\n" for index in range(60)))
    assert audit(path, *FAST, "--plain", "-o", "json") == 0
    worst = json.loads(capsys.readouterr().out)["transforms"][0]["worst"]
    assert worst["names"]["of"] == worst["others"]["of"] == 20


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        ("one\ntwo\nthree\n", (), "1 texts to read and 2 to learn from are too few"),
        ('{"text": "a", "name": "b"}\n', (), "line 1: Object contains unknown field `name`"),
        ('{"text": "a", "names": ["Bo"]}\n', (), "text 1: the entity 'Bo' does not stand in it"),
        (None, ("--transform", "noise"), "a number from 0 to 1000 must follow the colon"),
        (None, ("--transform", "noize:1"), "no transform 'noize:1'"),
        (None, ("--transform", "rotate:2"), "rotate takes no number"),
        (None, ("--attackers", "nearby"), "no attacker 'nearby'"),
        (None, ("--fail-above", "name=1"), "it is METRIC=SHARE"),
        (None, ("--fail-above", "tokens=5"), "a share from 0 to 1"),
        (None, (*FAST, "--fail-above", "others=1"), "the texts that were read have no others"),
    ],
)
def test_what_makes_no_sense_is_said(
    content: str | None,
    words: tuple[str, ...],
    said: str,
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = texts
    if content is not None:
        path = tmp_path / "texts"
        path.write_text(content, encoding="utf-8")
    assert audit(path, *words) == 1
    assert said in capsys.readouterr().err


def test_bytes_that_are_no_text_and_a_file_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    assert audit(tmp_path / "bytes") == 1
    assert "is not UTF-8 text" in capsys.readouterr().err
    assert audit(tmp_path / "nothing") == 2
    assert "No such file" in capsys.readouterr().err
