"""`inlay embeds audit`: texts of the demo, the gate, and input that makes no sense."""

import hashlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from scripts.demo_training.audit_texts import lines
from scripts.demo_training.world import build_world

from inlay import demo
from inlay.cli import main
from inlay.client import PromptEmbedder
from inlay_audit import command
from inlay_audit.attackers import ALL, NEED_TORCH
from inlay_audit.run import Audit, Audited
from inlay_audit.transform import Transform
from tests.serving import Served, free_port, serving

pytestmark = pytest.mark.extensions("audit")


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
    assert "\nrotate: READ. " in said.out
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
        (None, ("--transform", "noise:x"), "a number from 0 to 1000 must follow the colon"),
        (None, ("--transform", "noize"), "no transform 'noize'"),
        (None, ("--transform", "rotate:2"), "it is rotate or rotate:folded"),
        (None, ("--attackers", "nearby"), "no attacker 'nearby'"),
        (None, ("--fail-above", "name=1"), "it is METRIC=SHARE"),
        (None, ("--fail-above", "tokens=5"), "a share from 0 to 1"),
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


def test_a_gate_that_cannot_be_judged_is_another_status(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(texts, *FAST, "--fail-above", "others=1") == 2
    assert "the texts that were read have no others" in capsys.readouterr().err


def test_bytes_that_are_no_text_and_a_file_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    assert audit(tmp_path / "bytes") == 1
    assert "is not UTF-8 text" in capsys.readouterr().err
    assert audit(tmp_path / "nothing") == 2
    assert "No such file" in capsys.readouterr().err


MINE = """
import numpy as np

key = np.linalg.qr(np.random.default_rng(3).normal(size=(192, 192)))[0]


def turn(rows, token_ids, rng):
    assert rows.dtype == np.float32 and rows.shape == (len(token_ids), 192)
    return rows @ key


def broken(rows, token_ids, rng):
    return rows / np.zeros_like(rows)


def wrong(rows, token_ids, rng):
    raise KeyError("no key")


number = 3
"""
COMMAND = """
import sys

import numpy as np
from safetensors.numpy import load, save

given = load(sys.stdin.buffer.read())
if "--fail" in sys.argv:
    sys.exit("no more paper")
if "--nothing" not in sys.argv:
    mean = [
        given["rows"][a:b].reshape(-1, 192)[::2]
        for a, b in zip(given["offsets"], given["offsets"][1:])
    ]
    lengths = np.cumsum([0, *map(len, mean)])
    sys.stdout.buffer.write(save({"rows": np.concatenate(mean)[:, :64].copy(), "offsets": lengths}))
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine_of_audit.py").write_text(MINE, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_of_audit", raising=False)
    (tmp_path / "command.py").write_text(COMMAND, encoding="utf-8")
    return tmp_path


def test_a_function_of_the_users_is_audited(
    mine: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--transform", "mine_of_audit:turn", "--attackers", "signature", "-o", "json")
    assert audit(texts, *words) == 0
    (found,) = json.loads(capsys.readouterr().out)["transforms"]
    assert found["transform"] == "mine_of_audit:turn"
    assert found["worst"]["tokens"]["value"] >= 0.99


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("mine_of_audit:broken", "holds NaN or infinity, which a server refuses"),
        ("mine_of_audit:wrong", "failed at text 1: KeyError: 'no key' ("),
        ("mine_of_audit:number", "is no function but int"),
        ("mine_of_audit:nothing", "has no attribute 'nothing'"),
        ("no_such_module:f", "No module named 'no_such_module'"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value|divide by zero")
def test_a_function_that_fails_is_named(
    spec: str, said: str, mine: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(texts, "--transform", spec, "--public", str(texts)) == 1
    assert said in capsys.readouterr().err


def test_what_was_found_is_told_before_the_next_transform_is_tried(
    mine: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--transform", "none", "--transform", "mine_of_audit:wrong", "--attackers", "nearest")
    assert audit(texts, *words) == 1
    said = capsys.readouterr()
    assert "worst tokens: 100.0" in said.out
    assert "by nearest, advantage 100.0\n" in said.out
    assert "mine_of_audit:wrong failed" in said.err


def test_fast_is_all_attackers_that_need_no_torch(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--transform=none", "--attackers=nearest", "--attackers=fast", "--resends=1")
    assert audit(texts, *words, "-o", "json") == 0
    (found,) = json.loads(capsys.readouterr().out)["transforms"]
    tried = {each["attacker"] for each in found["attackers"]} | set(found["not_applicable"])
    assert tried == {"prior", *ALL} - set(NEED_TORCH)


def test_a_command_may_drop_rows_and_change_their_width(
    mine: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = shlex.join([sys.executable, str(mine / "command.py")])
    words = ("--attackers", "nearest", "--attackers", "ridge", "-o", "json", "--resends", "1")
    assert audit(texts, "--transform-command", command, *words) == 0
    (found,) = json.loads(capsys.readouterr().out)["transforms"]
    assert found["not_applicable"] == {
        "nearest": "rows are 64 wide, the table's 192",
        "ridge": "the number of rows is not that of the tokens",
    }
    assert found["worst"]["tokens"]["attacker"] == "prior"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{python}", "{mine}/command.py", "--fail"], "status 1 and said: no more paper"),
        (["{python}", "{mine}/command.py", "--nothing"], "is cut short: it has 0 bytes"),
        (["{mine}/nothing"], "No such file or directory"),
        ([], "--transform-command is empty"),
    ],
)
def test_a_command_that_fails_is_named(
    words: list[str], said: str, mine: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = shlex.join(each.format(python=sys.executable, mine=mine) for each in words)
    assert audit(texts, "--transform-command", command) == 1
    assert said in capsys.readouterr().err


def embedded(texts: Path) -> list[np.ndarray[tuple[int, int], np.dtype[np.float32]]]:
    embedder = PromptEmbedder.from_pretrained(demo.model_dir())
    messages = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
    return [
        embedder.embed_messages([{"role": "user", "content": each}]).rows.astype(np.float32)
        for each in messages
    ]


def test_rows_that_were_made_already_are_audited(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = embedded(texts)
    offsets = np.cumsum([0, *map(len, rows)])
    save_file({"rows": np.concatenate(rows), "offsets": offsets}, tmp_path / "rows.safetensors")
    given = ("--rows", str(tmp_path / "rows.safetensors"))
    words = ("--attackers", "nearest", "--attackers", "resends", "-o", "json")
    assert audit(texts, *given, *words) == 0
    (found,) = json.loads(capsys.readouterr().out)["transforms"]
    assert found["worst"]["tokens"]["value"] == 1
    assert found["not_applicable"] == {"resends": "no prompt was sent twice"}
    save_file({"rows": np.concatenate(rows)[::-1].copy(), "offsets": offsets}, tmp_path / "other")
    assert audit(texts, "--rows", str(tmp_path / "other"), "--attackers", "nearest") == 0
    assert "rows of other texts, in another order or of another" in capsys.readouterr().out
    assert audit(texts, *given, "--public", str(texts)) == 2
    assert "--rows are of the texts of --texts" in capsys.readouterr().err


ROWS = np.ones((240, 192), np.float32)
EACH = np.arange(0, 241, 2)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"rows": ROWS, "offsets": EACH[:-1]}, "offsets must go from 0 to the 240 of its rows"),
        ({"rows": ROWS, "offsets": EACH[::-1].copy()}, "offsets must go from 0"),
        ({"rows": ROWS, "offsets": np.array([0, 9, 4, 240])}, "offsets must not fall"),
        ({"rows": ROWS, "offsets": np.array([0, 240])}, "rows of 1 texts, and --texts has 120"),
        ({"rows": ROWS[:, :64].copy(), "offsets": EACH}, "made for another model? Name that one"),
        ({"rows": ROWS * np.nan, "offsets": EACH}, "holds NaN or infinity"),
        ({"rows": ROWS.astype(np.int32), "offsets": EACH}, "it must be F64 or F32 or F16 or BF16"),
        ({"x": ROWS}, "holds x; it must hold `rows`"),
    ],
)
def test_files_that_are_no_rows_of_these_texts_are_refused(
    tensors: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]],
    said: str,
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_file(tensors, tmp_path / "rows.safetensors")
    assert audit(texts, "--rows", str(tmp_path / "rows.safetensors")) == 1
    assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(command="demo") as served:
        yield served


def test_answers_to_the_rows_that_were_read_are_compared(
    server: Served, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transforms = [f"--transform={each}" for each in ("none", "noise:4", "project:64")]
    words = (*transforms, "--attackers", "nearest", "--url", server.v1)
    assert audit(texts, *words, "-o", "json") == 0
    clean, noisy, narrow = json.loads(capsys.readouterr().out)["transforms"]
    assert clean["unanswered"] is None
    assert clean["answers"]["same"]["value"] == 1
    assert clean["answers"]["right"]["of"] == 40
    assert clean["answers"]["right"]["value"] > 0.6
    assert noisy["answers"]["same"]["value"] < 0.2
    assert narrow["answers"] is None
    assert "192" in narrow["unanswered"]
    assert audit(texts, "--transform=none", "--attackers=nearest", "--url", server.v1) == 0
    assert "answers the same: 100.0 [" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_named(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    assert audit(texts, *FAST, "--url", url) == 1
    said = capsys.readouterr()
    assert f"{url} cannot be reached" in said.err
    # Before any attacker was tried.
    assert said.out == ""


def test_reports_are_compared_and_kept(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, kept = tmp_path / "before.json", tmp_path / "kept.html"
    assert audit(texts, *FAST[:4], "--transform", "none", "rotate", "-o", "json") == 0
    before.write_text(capsys.readouterr().out, encoding="utf-8")
    words = ("--transform", "none", "--most-texts", "20", "--compare", before, "--report", kept)
    assert audit(texts, *FAST[:4], *map(str, words)) == 0
    said = capsys.readouterr().out
    assert said.startswith("20 of 40 texts were read")
    table = said[said.index("\ntransform  report") :].splitlines()[2:5]
    assert [line.split()[:3] for line in table] == [
        ["none", "before", "READ"],
        ["none", "this", "READ"],
        ["rotate", "before", "READ"],
    ]
    page = kept.read_text(encoding="utf-8")
    assert "none: READ. 100 % of tokens" in page
    assert hashlib.sha256(texts.read_bytes()).hexdigest() in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    # It may be handed on: no text is in it.
    secret = [json.loads(line)["text"] for line in texts.read_text(encoding="utf-8").splitlines()]
    assert not any(text in page for text in secret)
    kept.write_text("{}", encoding="utf-8")
    assert audit(texts, "--compare", str(kept)) == 1
    assert "is no report of this command" in capsys.readouterr().err


def test_of_a_large_vocabulary_a_sample_is_read_and_the_verdict_says_so(
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "LARGE_TABLE", 1000)
    monkeypatch.setattr(command, "_SAMPLE", 25)
    assert audit(texts, *FAST) == 0
    said = capsys.readouterr().out
    assert said.startswith("25 of 40 texts were read, 80 are known")
    assert "rotate: READ. " in said
    assert " Read: 25 of 40 texts, drawn at random." in said
    assert audit(texts, *FAST, "--most-texts", "40", "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["texts"], found["of_texts"]) == (40, 40)
    gate = tmp_path / "gate.yaml"
    gate.write_text("least-texts: 30", encoding="utf-8")
    assert audit(texts, *FAST, "--thresholds", str(gate)) == 0
    assert capsys.readouterr().out.startswith("30 of 40 texts were read")


def test_what_was_found_is_told_where_it_is_interrupted(
    texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Audit.of

    def of(self: Audit, transform: Transform) -> Audited:
        if transform.name == "rotate":
            raise KeyboardInterrupt
        return whole(self, transform)

    monkeypatch.setattr(Audit, "of", of)
    assert audit(texts, *FAST[:4], "--transform", "none", "rotate", "-o", "json") == 130
    said = json.loads(capsys.readouterr().out)
    assert not said["complete"]
    assert [each["transform"] for each in said["transforms"]] == ["none"]
