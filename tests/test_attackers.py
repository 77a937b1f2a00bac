"""The benchmark of attacks runs where its user has fewer rights."""

from pathlib import Path

import pytest
from benchmarks.attacks import NICER, give_way


def test_attackers_who_may_not_give_way_say_so_and_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    give_way(tmp_path / "none")
    (tmp_path / "autogroup").touch()
    give_way(tmp_path / "autogroup")
    assert (tmp_path / "autogroup").read_text() == str(NICER)
    assert capsys.readouterr().err == ""
    give_way(tmp_path)  # refuses to be written, as the real one does those without rights
    assert "the same share of cores as the server" in capsys.readouterr().err
