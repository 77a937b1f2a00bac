"""Every flag of `vllm serve` is one of `inlay serve`, or an error names what to do instead."""

import argparse
import json
import os
from typing import Any

import pytest

from tests.commands import run

NUMBERS = ["8", "8k", "8K", "25.6k", "1m", "2M", "1g", "3G", "1t", "1T", "0k"]

OLD = ["--disable-log-requests"]
"""Flags that vLLM had before."""

TOLD = f"""
import json
from inlay.cli.commands import commands
from inlay.cli.reading import expand_suffix
from inlay.cli.vllm_flags import ENGINE_SWITCHES, ENGINE_VALUES, FORMS, INSTEAD, OURS
from inlay.engine.ranks import SHORT
serve = next(command for command in commands() if command.name == "serve")
print(json.dumps({{
    "forms": [*FORMS],
    "own": [option.flag for option in serve.options.flags],
    "instead": [*INSTEAD, "--model", *(set(OURS) - set({OLD!r}))],
    "switches": sorted(ENGINE_SWITCHES),
    "values": sorted(ENGINE_VALUES),
    "short": dict(SHORT),
    "numbers": [int(expand_suffix(text)) for text in {NUMBERS!r}],
}}))
"""
"""The command line is not part of an engine's environment: what it knows is asked in its own."""


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    python = os.environ.get("FRONTEND_PYTHON")
    if python is None:
        pytest.skip("FRONTEND_PYTHON names the Python with inlay's own requirements")
    found: dict[str, Any] = json.loads(run(python, "-c", TOLD))
    return found


def actions() -> list[Any]:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    every = make_arg_parser(FlexibleArgumentParser())._actions
    return [action for action in every if action.dest not in ("help", "config", "model_tag")]


def long_names(action: Any) -> list[str]:
    return [name for name in action.option_strings if name.startswith("--") and name[:5] != "--no-"]


def test_every_flag_of_vllm_is_ours_or_has_a_word_of_advice(known: dict[str, Any]) -> None:
    theirs = {name for action in actions() for name in long_names(action)}
    listed = {*known["instead"], *(f"--{name}" for name in (*known["switches"], *known["values"]))}
    listed -= {name for name in listed if name.startswith("--no-")}
    assert sorted(theirs - set(known["own"]) - listed) == []
    assert sorted(listed - theirs) == []
    assert sorted(listed & set(known["own"])) == []


def test_flags_that_go_to_the_engine_are_ones_it_takes_there(known: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    taken = {name[2:]: action for action in parser._actions for name in long_names(action)}
    listed = {*known["switches"], *known["values"]}
    assert sorted(listed - set(taken)) == []
    switches = [
        name
        for name in sorted(listed)
        if taken[name].nargs == 0 or isinstance(taken[name], argparse.BooleanOptionalAction)
    ]
    assert switches == known["switches"]


def test_every_form_that_quantization_names_there_is_known(known: dict[str, Any]) -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    # Of earlier versions are the others.
    assert {*known["forms"]} - {*QUANTIZATION_METHODS} == {"bitsandbytes", "gguf"}
    assert {*QUANTIZATION_METHODS} <= {*known["forms"]}


def test_short_flags_stand_for_what_they_stand_for_there(known: dict[str, Any]) -> None:
    theirs = {
        short: long_names(action)[0]
        for action in actions()
        for short in action.option_strings
        if not short.startswith("--")
    }
    assert known["short"] == {**theirs, "-O": "--optimization-level"}


def test_integers_with_a_suffix_mean_what_they_mean_there(known: dict[str, Any]) -> None:
    from vllm.utils.argparse_utils import human_readable_int

    assert known["numbers"] == [human_readable_int(text) for text in NUMBERS]
