from typing import Any

import pytest

from inlay.cli.command import UsageError
from inlay.cli.engine_args import with_engine_args
from inlay.engine.settings import EngineSettings


def test_words_after_the_dashes_follow_those_of_a_file_and_what_flags_mean_comes_last() -> None:
    engine = EngineSettings.of(model="m", engine="vllm", engine_arguments=["--seed", "5"])
    found = with_engine_args(
        engine, ["--quantization", "fp8"], "--enable-prompt-embeds", "--scheduling-policy priority"
    )
    assert found.library.engine_arguments == [
        *(
            "--seed",
            "5",
            "--quantization",
            "fp8",
            "--enable-prompt-embeds",
            "--scheduling-policy",
            "priority",
        )
    ]
    assert found.given().keys() == engine.given().keys()


@pytest.mark.parametrize(
    "given", ["--enable-prompt-embeds", "--no-enable-prompt-embeds", "--enable-prompt-embeds=1"]
)
def test_a_word_that_was_given_stays_as_it_was_given(given: str) -> None:
    engine = EngineSettings.of(model="m", engine="vllm")
    assert with_engine_args(engine, [given], "--enable-prompt-embeds").library.engine_arguments == [
        given
    ]


@pytest.mark.parametrize("name", ["sglang", "vllm-omni"])
def test_other_engines_are_told_their_own_words_and_not_vllms(name: Any) -> None:
    engine = EngineSettings.of(model="m", engine=name, engine_arguments=["--own", "1"])
    found = with_engine_args(engine, ["--further", "0.5"], "--enable-prompt-embeds")
    assert found.library.engine_arguments == ["--own", "1", "--further", "0.5"]


def test_an_engine_that_takes_no_words_says_so() -> None:
    engine = EngineSettings.of(model="m")
    assert with_engine_args(engine, [], "--enable-prompt-embeds") is engine
    with pytest.raises(
        UsageError, match="the torch engine takes no further arguments, got '--seed 5' after --"
    ):
        with_engine_args(engine, ["--seed", "5"])
