"""Parts of SGLang that cannot run without a GPU.

Inlay's words for it are held against the installed SGLang, and the page says what SGLang says.
"""

import argparse
import multiprocessing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.sglang.sampling import params_of
from inlay.messages.prompt import Prompt, Tokens
from tests.engine.conformance import make_request
from tests.engines.sglang.serving import FLAGS
from tests.engines.starting import running

PAGE = (Path(__file__).parents[3] / "docs" / "engines.md").read_text(encoding="utf-8")


def settings_of(directory: Path, **more: Any) -> EngineSettings:
    return EngineSettings.of(model=str(directory), **FLAGS | more)


def test_sglang_knows_every_word_it_is_given_for_a_gpu(directory: Path) -> None:
    from sglang.srt.server_args import ServerArgs

    from inlay.engine.sglang.arguments import _with_inlay_names

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    for more in ({"device": "cuda"}, {"device": "auto"}, {"device": "cuda", "enforce_eager": True}):
        settings = settings_of(directory, enable_prefix_caching=False, **more)
        words = [*_with_inlay_names(settings, directory), "--enable-deterministic-inference"]
        known, unknown = parser.parse_known_args(words)
        assert not unknown
        assert known.enable_deterministic_inference
        assert "--attention-backend" not in words


def test_sglang_knows_every_field_of_a_request_with_a_seed() -> None:
    from sglang.srt.sampling.sampling_params import SamplingParams

    asked = params_of(
        make_request("seeded", Prompt.of(Tokens([5])), seed=7, temperature=1.0), seeded=True
    )
    assert asked["sampling_seed"] == 7
    assert asked.keys() <= {field.name for field in msgspec.structs.fields(SamplingParams)}


async def test_seeds_are_refused_by_sglang_on_a_cpu_as_the_page_says(directory: Path) -> None:
    words = [*FLAGS["engine_arguments"], "--enable-deterministic-inference"]
    with pytest.raises(InvalidRequestError) as refused:
        async with running(settings_of(directory, engine_arguments=words)):
            pass
    said = refused.value.message.partition("SGLang refuses the model or its settings: ")[2]
    assert said
    assert said in PAGE


async def test_a_gpu_that_is_not_there_is_sglangs_own_error(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from inlay.engine.sglang.process import open_contexts

    before, contexts = set(multiprocessing.active_children()), set(open_contexts())
    with pytest.raises(
        EngineError, match="SGLang did not start; its own output above says why"
    ) as failed:
        async with running(settings_of(directory, device="cuda")):
            pass
    said = capfd.readouterr()
    assert "module 'torch._C' has no attribute '_cuda_setDevice'" in said.out + said.err
    assert "module 'torch._C' has no attribute '_cuda_setDevice'" in PAGE
    assert "Rank 0 scheduler died during initialization" in failed.value.message
    assert set(multiprocessing.active_children()) == before
    # A context that is left is found by a collection of garbage, which then waits for ever.
    assert set(open_contexts()) <= contexts
