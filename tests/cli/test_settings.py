"""Flags, environment and config files: one settings class is the source of all three."""

from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from inlay.cli.command import Command, UsageError
from inlay.cli.commands import commands, known_variables
from inlay.cli.options import Options
from inlay.cli.reading import parse, read
from inlay.cli.settings import ServeSettings
from inlay.cli.usage import ALL, usage
from inlay.cli.vllm_flags import (
    ENGINE_SWITCHES,
    ENGINE_VALUES,
    HARMLESS_SWITCHES,
    HARMLESS_VALUES,
    INSTEAD,
    NEUTRAL,
    OURS,
    REMOVED,
    WITHOUT_VLLM,
)
from tests.deepseek import recipes

SERVE = next(command for command in commands() if command.name == "serve")


def serve(*words: str, environ: dict[str, str] | None = None) -> ServeSettings:
    result = read(SERVE, parse(SERVE, words), environ or {}, known_variables())
    assert isinstance(result, ServeSettings)
    return result


def refusal(*words: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        serve(*words, environ=environ)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_local_media_are_below_a_directory_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "missing"):
        message = refusal("m", "--allowed-local-media-path", str(tmp_path / name))
        assert message.startswith("--allowed-local-media-path: must be a directory that is there")
    got = serve("m", "--allowed-local-media-path", str(tmp_path))
    assert got.frontend.allowed_local_media_path == tmp_path


def test_a_model_alone_gets_every_default() -> None:
    got = serve("m")
    assert got.engine.model.model == "m"
    assert got.frontend.port == 8000
    assert got.engine.cache.enable_prefix_caching
    assert not got.frontend.enable_prompt_embeds
    # Images stay where they are in a message, said or not.
    assert serve("m", "--interleave-mm-strings") == got


@pytest.mark.parametrize(
    "words", recipes(), ids=lambda words: " ".join(words[words.index("--") + 1 :])
)
def test_the_commands_for_deepseek_are_ones_inlay_takes(words: list[str]) -> None:
    assert words[0] == "serve"
    got = serve(*words[1:])
    assert (got.engine.model.engine, got.frontend.enable_prompt_embeds) == ("vllm", True)
    # A body that holds the largest prompt in base64 is not refused for its size, and there is room
    # for several.
    if got.frontend.max_prompt_embeds_bytes != "auto":
        assert isinstance(got.frontend.max_prompt_embeds_bytes, int)
        assert got.frontend.max_request_embeds_bytes >= got.frontend.max_prompt_embeds_bytes
        assert got.frontend.max_body_bytes > got.frontend.max_prompt_embeds_bytes * 4 / 3
        assert got.frontend.max_inflight_bytes > 3 * got.frontend.max_body_bytes


def test_flags_reach_the_section_they_belong_to() -> None:
    got = serve(
        "m",
        "--port",
        "9",
        "--max-num-seqs=3",
        "--enable-prompt-embeds",
        "--no-enable-prefix-caching",
    )
    assert (got.frontend.port, got.engine.batch.max_num_seqs) == (9, 3)
    assert got.frontend.enable_prompt_embeds
    assert not got.engine.cache.enable_prefix_caching


@pytest.mark.parametrize(
    "words",
    [
        ("m", "--served-model-name", "a", "b"),
        ("m", "--served-model-name", "a", "--port", "1", "--served-model-name", "b"),
        ("m", "--served-model-name=a", "--served-model-name=b"),
    ],
)
def test_a_list_may_be_repeated_or_separated_by_spaces(words: tuple[str, ...]) -> None:
    assert serve(*words).engine.model.served_model_name == ["a", "b"]


def test_a_list_comes_from_the_environment_separated_by_spaces() -> None:
    keys = serve("m", environ={"INLAY_API_KEY": "one two"}).frontend.api_key
    assert [key.get_secret_value() for key in keys] == ["one", "two"]


@pytest.mark.parametrize("suffix", ["yaml", "toml"])
def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path, suffix: str) -> None:
    config = tmp_path / f"serve.{suffix}"
    colon = ": " if suffix == "yaml" else " = "
    config.write_text(f"port{colon}1\nmax-num-seqs{colon}2\nblock_size{colon}32\n")
    environ = {"INLAY_PORT": "3", "INLAY_MAX_NUM_SEQS": "4"}
    got = serve("m", "--config", str(config), "--port", "5", environ=environ)
    assert (got.frontend.port, got.engine.batch.max_num_seqs, got.engine.cache.block_size) == (
        5,
        4,
        32,
    )
    assert got.engine.batch.max_num_batched_tokens == 2048
    assert serve("m", environ={"INLAY_CONFIG": str(config)}).frontend.port == 1


def test_the_model_may_come_from_the_environment() -> None:
    assert serve(environ={"INLAY_MODEL": "m"}).engine.model.model == "m"


def test_a_file_may_hold_lists_switches_and_a_single_value_for_a_list(tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(
        "model: m\napi_key: [a, b]\nserved-model-name: one\nenable-prompt-embeds: true\n"
    )
    got = serve("--config", str(config))
    assert [key.get_secret_value() for key in got.frontend.api_key] == ["a", "b"]
    assert got.engine.model.served_model_name == ["one"]
    assert got.frontend.enable_prompt_embeds


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "MODEL is missing"),
        (("m", "--max-num-seq", "3"), "unknown option --max-num-seq, did you mean --max-num-seqs?"),
        (("m", "--zzz"), "unknown option --zzz"),
        (("m", "--port"), "--port needs a value"),
        (("m", "--port", "--host", "h"), "--port needs a value"),
        (("m", "--api-key"), "--api-key needs at least one value"),
        (("m", "--port", "eighty"), "--port: must be an integer, got 'eighty'"),
        (("m", "--port", "-1"), "--port: must be at least 0, got '-1'"),
        (("m", "--max_model_len", "1x"), "--max_model_len: must be an integer, got '1x'"),
        (("m", "--max-model-len=auto"), "--max-model-len: must be an integer, got 'auto'"),
        (
            ("m", "--max-prompt-embeds-bytes", "all"),
            "--max-prompt-embeds-bytes: must be an integer or 'auto', got 'all'",
        ),
        (("m", "--truncate-prompt-tokens", "0"), "must be -1 or at least 1, got '0'"),
        (("m", "--gpu-memory-utilization", "x"), "must be a number, got 'x'"),
        (
            ("m", "--dtype", "int8"),
            "--dtype: must be 'auto', 'half', 'float16', 'bfloat16', 'float' or 'float32'",
        ),
        (
            ("m", "--disable-prefix-caching"),
            "--disable-prefix-caching, did you mean --no-enable-prefix-caching?",
        ),
        (("m", "--enable-prompt-embeds=yes"), "--enable-prompt-embeds takes no value"),
        (("m", "--no-port"), "unknown option --no-port"),
        (
            ("m", "--no-interleave-mm-strings"),
            "--no-interleave-mm-strings: images always stay where they are in a message",
        ),
        (("m", "--model", "n"), "MODEL is given twice: 'm' and 'n'"),
        (("m", "--limit-mm-per-prompt", "image=x"), 'must be JSON, {"image": 2}, or image=2'),
        (("m", "--limit-mm-per-prompt", "smell=2"), "limits of media are counts from 0 of"),
        (("m", "n"), "unexpected word 'n'"),
        (("m", "--config", "missing.yaml"), "config file 'missing.yaml': No such file"),
        (("m", "--config", "serve.ini"), "must end in .yaml, .yml or .toml"),
    ],
)
def test_wrong_words_are_refused_in_one_line(words: tuple[str, ...], said: str) -> None:
    assert said in refusal(*words)


def test_flags_may_be_written_with_underscores_as_with_vllm() -> None:
    got = serve("m", "--max_num_seqs", "3", "--max_model_len=64", "--no_enable_prefix_caching")
    assert (got.engine.batch.max_num_seqs, got.engine.batch.max_model_len) == (3, 64)
    assert not got.engine.cache.enable_prefix_caching
    # Only the flag's own underscores: a value keeps its.
    assert serve("m", "--served_model_name=a_b").engine.model.served_model_name == ["a_b"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("2m", 2_000_000), ("1M", 1 << 20)],
)
def test_integers_may_have_a_suffix_as_with_vllm(tmp_path: Path, given: str, meant: int) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(f"max-model-len: {given}\n")
    for got in (
        serve("m", "--max-model-len", given),
        serve("m", environ={"INLAY_MAX_MODEL_LEN": given}),
        serve("m", "--config", str(config)),
    ):
        assert got.engine.batch.max_model_len == meant
    assert serve("m", "--max-prompt-embeds-bytes", given).frontend.max_prompt_embeds_bytes == meant


def test_a_fraction_of_a_power_of_1024_is_refused() -> None:
    message = refusal("m", "--max-model-len", "1.5K")
    assert "--max-model-len: K takes whole numbers, did you mean 1.5k?, got '1.5K'" in message
    assert serve("m", "--served-model-name", "8k").engine.model.served_model_name == ["8k"]


@pytest.mark.parametrize(
    ("given", "meant"), [("half", "float16"), ("float", "float32"), ("auto", "auto")]
)
def test_dtypes_have_vllms_names(given: str, meant: str) -> None:
    assert serve("m", "--dtype", given).engine.model.dtype == meant


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("m", "--pipeline-parallel-size", "2"),
            "is not supported by the torch engine; with vLLM: --engine vllm -- --pipeline-parallel-size 2",
        ),
        (
            ("-pp=2", "m", "--no_enable_eplb", "--kv-cache-dtype", "fp8 x"),
            "-pp, --no_enable_eplb and --kv-cache-dtype are not supported by the torch engine; with vLLM: --engine vllm -- --pipeline-parallel-size 2 --no-enable-eplb --kv-cache-dtype 'fp8 x'",
        ),
        (
            ("m", "--engine", "vllm", "--trust-remote-code"),
            "--trust-remote-code is vLLM's own, and goes after --: -- --trust-remote-code",
        ),
        (("--quantization-config",), "--engine vllm -- --quantization-config VALUE"),
        (("m", "--engine", "vllm", "-O3"), "-O is vLLM's own, and goes after --: -- --optimization-level 3"),
        (("m", "--uds", "/run/x"), "--uds is an option of vLLM: listen on 127.0.0.1"),
        (("m", "--api-server-count", "2"), "more than one frontend is a fleet"),
        (("m", "--collect-model-forward-time", "all"), "earlier versions of vLLM: see --otlp"),
    ],
)  # fmt: skip
def test_flags_of_vllm_alone_are_answered_with_what_to_do(
    words: tuple[str, ...], said: str
) -> None:
    message = refusal(*words)
    assert said in message
    assert "did you mean" not in message


@pytest.mark.parametrize(
    "words",
    [
        ("--seed", "0"),
        ("--seed=0",),
        ("--disable-log-stats",),
        ("--uvicorn-log-level", "warning"),
        ("--trust-remote-code",),
        ("--no-enable-chunked-prefill",),
        ("--swap_space", "4"),
        ("-O", "3"),
        ("-O=3",),
        ("-pp", "1"),
        ("--load-format=auto",),
    ],
)
def test_harmless_flags_of_vllm_are_said_and_the_server_starts(
    words: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert serve(*words, "m") == serve("m")
    assert f"{words[0].partition('=')[0]} has no effect: " in caplog.text


def test_what_only_tunes_vllm_is_not_taken_from_vllm() -> None:
    assert serve("m", "-O3") == serve("m")
    assert "goes after --: -- --attention-backend X" in refusal(
        "--attention-backend", "X", "m", "--engine", "vllm"
    )


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (("--model", "m"), ("m",)),
        (("--port", "1", "--model=m"), ("m", "--port", "1")),
        (("m", "-tp", "2"), ("m", "--tensor-parallel-size", "2")),
        (("-tp2", "m"), ("m", "--tensor-parallel-size", "2")),
        (("m", "-dp=2"), ("m", "--data-parallel-size", "2")),
        (("--disable-log-requests", "m"), ("m", "--no-log-requests")),
        (("--enable-log-requests", "m"), ("m", "--log-requests")),
        (("m", "--disable_uvicorn_access_log"), ("m", "--no-log-requests")),
        (("m", "--shutdown-timeout", "3"), ("m", "--drain-timeout", "3")),
        (("m", "--limit-mm-per-prompt", "image=4"), ("m", "--limit-mm-per-prompt", '{"image": 4}')),
        (
            ("m", "--limit-mm-per-prompt", "image=4, video=1"),
            ("m", "--limit-mm-per-prompt", '{"image": 4, "video": 1}'),
        ),
    ],
)
def test_flags_of_vllm_with_another_name_here_are_read_as_it(
    words: tuple[str, ...], same: tuple[str, ...]
) -> None:
    assert serve(*words) == serve(*same)


def test_keys_of_vllm_that_do_nothing_here_may_stand_in_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("model: m\nseed: 0\ndisable-log-stats: true\npipeline-parallel-size: 1\n")
    assert serve("--config", str(config)) == serve("m")
    assert f"{config}: seed has no effect: " in caplog.text


def test_each_flag_of_vllm_has_one_fate() -> None:
    advised = {*INSTEAD, *REMOVED}
    engines = {f"--{name}" for name in ENGINE_VALUES | ENGINE_SWITCHES}
    assert advised >= HARMLESS_SWITCHES | HARMLESS_VALUES
    assert not HARMLESS_SWITCHES & HARMLESS_VALUES
    assert engines >= set(WITHOUT_VLLM)
    assert advised | engines >= set(NEUTRAL)
    assert not (advised & engines) | (advised & set(OURS))


def test_no_option_of_ours_is_listed_among_vllms_alone() -> None:
    own = {option.key for option in SERVE.options.flags}
    listed = (
        {flag.removeprefix("--") for flag in (*INSTEAD, *REMOVED)} | ENGINE_VALUES | ENGINE_SWITCHES
    )
    assert sorted(own & (listed | {flag.removeprefix("--") for flag in OURS})) == []


def test_every_unknown_flag_key_and_variable_is_named_at_once(tmp_path: Path) -> None:
    message = refusal(
        "m",
        "--pipeline-parallel-size",
        "2",
        "--max-num-seq",
        "1",
        "--zzz",
        "--uds",
        "x",
    )
    for name in (
        "--pipeline-parallel-size",
        "--max-num-seq, did you mean --max-num-seqs?",
        "--zzz",
        "--uds",
    ):
        assert name in message
    message = refusal("m", environ={"INLAY_ZZZ": "1", "INLAY_YYY": "1"})
    assert "INLAY_ZZZ" in message
    assert "INLAY_YYY" in message
    config = tmp_path / "serve.yaml"
    config.write_text("zzz: 1\npipeline-parallel-size: 2\n")
    message = refusal("m", "--config", str(config))
    assert "unknown key zzz" in message
    assert "--pipeline-parallel-size" in message


def test_every_wrong_value_is_named_at_once() -> None:
    message = refusal("m", "--port", "x", "--max-num-seqs", "0")
    assert "--port: " in message
    assert "--max-num-seqs: " in message


def test_a_wrong_value_is_said_in_the_words_of_its_source(tmp_path: Path) -> None:
    assert "INLAY_PORT: " in refusal("m", environ={"INLAY_PORT": "x"})
    config = tmp_path / "c.toml"
    config.write_text('port = "x"\n')
    assert f"port in {config}: " in refusal("m", "--config", str(config))


def test_unknown_and_empty_variables_are_refused_but_another_commands_are_not() -> None:
    message = refusal("m", environ={"INLAY_MAX_NUM_SQS": "1"})
    assert (
        "unknown environment variable INLAY_MAX_NUM_SQS, did you mean INLAY_MAX_NUM_SEQS?"
        in message
    )
    assert "INLAY_API_KEY is set but empty" in refusal("m", environ={"INLAY_API_KEY": ""})
    assert serve("m", environ={"INLAY_KEEP_SERVING": "false", "PATH": ""}).engine.model.model == "m"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-num-sqs: 3\n", "unknown key max-num-sqs, did you mean max-num-seqs?"),
        ("port: 1\nport: [\n", "serve.yaml': line 3, column 1: "),
        ("- port\n", "must be a table of options, got list"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "max-num-seqs is given twice"),
        ("api_key: {a: b}\n", "api-key in "),
    ],
)
def test_a_wrong_config_file_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(text)
    assert said in refusal("m", "--config", str(config))


def test_words_after_the_dashes_are_kept_untouched() -> None:
    words = parse(SERVE, ["m", "--port", "1", "--", "--anything", "--", "x=1"])
    assert words.extra_args == ["--anything", "--", "x=1"]


def test_a_command_without_an_engine_refuses_words_after_the_dashes() -> None:
    demo = next(command for command in commands() if command.name == "demo")
    with pytest.raises(UsageError, match="takes no further arguments, got '--x'"):
        parse(demo, ["--", "--x"])


class _Inner(BaseModel):
    count: int = Field(default=1, ge=0, description="How many.")


class _Outer(BaseModel):
    ratio: float = 0.5
    name: str | None = None
    mode: Literal["a", "b"] = "a"
    flag: bool = True
    words: list[str] = []
    inner: _Inner = Field(title="Inner")


@settings(derandomize=True, max_examples=60)
@given(
    ratio=st.floats(allow_nan=False),
    name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    flag=st.booleans(),
    words=st.lists(st.text("abc=é ", min_size=1), min_size=1),
    count=st.integers(min_value=0),
)
def test_what_is_written_as_flags_is_read_back(
    ratio: float, name: str, flag: bool, words: list[str], count: int
) -> None:
    command = Command("x", "", "main", _Outer)
    line = [
        f"--ratio={ratio}",
        f"--name={name}",
        "--flag" if flag else "--no-flag",
        f"--count={count}",
    ]
    line += [f"--words={word}" for word in words]
    got = read(command, parse(command, line), {}, set())
    assert got == _Outer(ratio=ratio, name=name, flag=flag, words=words, inner=_Inner(count=count))


def test_two_options_of_one_name_are_refused_where_they_are_declared() -> None:
    class Twice(BaseModel):
        count: int = 1
        inner: _Inner

    with pytest.raises(ValueError, match="two options named 'count'"):
        Options.of(Twice)


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.name)
def test_help_names_every_option_and_every_option_has_a_description(command: Command) -> None:
    text = usage(command, ALL)
    for option in command.options.by_name.values():
        assert option.description
        assert option.flag in text or f"--[no-]{option.key}" in text
    assert max(map(len, text.splitlines())) <= 110


def test_a_model_is_called_as_its_directory_and_not_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "my-model"
    directory.mkdir()
    (tmp_path / "link").symlink_to(directory)
    assert serve(str(directory)).engine.model.names == ["my-model"]
    assert serve(f"{directory}/").engine.model.names == ["my-model"]
    assert serve(str(tmp_path / "link")).engine.model.names == ["link"]
    monkeypatch.chdir(directory)
    assert serve(".").engine.model.names == ["my-model"]
    assert serve("owner/model").engine.model.names == ["owner/model"]
    assert serve(str(directory), "--served-model-name", "a", "b").engine.model.names == ["a", "b"]
