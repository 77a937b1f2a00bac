"""Pages of a GPU in another engine, and back from host memory: output is that of one engine."""

import pytest
import torch

from inlay.messages.prompt import Prompt, Tokens
from inlay.transport.local.arena import anonymous_file
from tests.engine import reference
from tests.engine.conformance import Receiver, ids, make_request
from tests.engine.torch.test_page_exchange import (
    FROM_PEER,
    PEER,
    answers,
    one_page_at_a_time,
    pair,
)
from tests.engine.torch.test_page_tiers import keeping, small
from tests.models import tiny

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek_v3"])
async def test_what_was_computed_elsewhere_gives_the_same_output(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_page_at_a_time(monkeypatch)
    directory, tokens = tiny(family), ids(1, 150)
    rows = reference.rows_of(reference.look_up(directory, tokens[30:90]))
    prompts = {
        "text": Prompt.of(Tokens(tokens)),
        "mixed": Prompt.of(Tokens(tokens[:30]), rows, Tokens(tokens[90:])),
    }
    async with pair(directory, device=DEVICE) as (direct, asking):
        giving = direct.engines[PEER]
        assert giving is not None
        # Steps run on both, and pages are copied between and beside them.
        other = make_request("other", Prompt.of(Tokens(ids(2, 20))), 200)
        receivers = [Receiver(other) for _ in range(2)]
        for engine, receiver in zip((giving, asking), receivers, strict=True):
            engine.submit(other, receiver)
        for name, prompt in prompts.items():
            truth = reference.greedy(directory, prompt, 24)
            for engine, sources in ((giving, ()), (asking, FROM_PEER)):
                request = make_request(name, prompt, 24, salt=name, sources=sources)
                receiver = Receiver(request)
                engine.submit(request, receiver)
                await receiver.ended()
                assert receiver.output == truth, name
            assert receiver.cached == 144
        for receiver in receivers:
            await receiver.ended()
        assert receivers[0].output == receivers[1].output
        assert giving.stats().blocks_used == asking.stats().blocks_used == 0


async def test_what_was_evicted_comes_back_and_gives_the_same_output() -> None:
    config = (await small(tiny("llama"))).replace(device=DEVICE)
    async with keeping(config, anonymous_file(4 << 20)) as (engine, tiers):
        for _ in range(2):
            for name in "abcdef":
                prompt = Prompt.of(Tokens(ids(ord(name), 100)))
                output, _ = await answers(engine, make_request(name, prompt))
                assert output == reference.greedy(tiny("llama"), prompt, len(output))
                tiers.flush()
        assert engine.stats().kv_pages_loaded > 0
