"""Latent attention: absorbed and expanded are the same numbers, and pages hold latents alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.weights.latent import LatentWeights
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Request, Sampling
from tests.engine.torch.test_families import core_of, ids, load, truth

HEADS, KEY, ROTARY, VALUE, LATENT = 3, 8, 4, 6, 10


def weights(seed: int) -> LatentWeights:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(HEADS * (KEY + VALUE), LATENT, generator=generator, dtype=torch.float64)
    return LatentWeights(weight, HEADS, ROTARY, VALUE)


def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[H, T, D], [H, L, D] and [H, L, E] to [T, H, E]."""
    scores = torch.matmul(query, keys.transpose(1, 2))
    return torch.matmul(scores.softmax(-1), values).transpose(0, 1)


@pytest.mark.parametrize("seed", range(5))
def test_absorbed_is_expanded(seed: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    latent = weights(seed)
    pages = torch.randn(7, LATENT + ROTARY, generator=generator, dtype=torch.float64)
    query = torch.randn(HEADS, 4, KEY + ROTARY, generator=generator, dtype=torch.float64)
    keys, values = latent.expand(pages, slice(HEADS), -1)
    assert keys.shape == (HEADS, 7, KEY + ROTARY)
    assert values.shape == (HEADS, 7, VALUE)
    absorbed = attend(latent.absorb(query, ()), pages[None], pages[None, :, :LATENT])
    torch.testing.assert_close(latent.outputs(absorbed, ()), attend(query, keys, values))


def test_a_head_alone_is_expanded_as_among_the_others() -> None:
    latent = weights(0)
    pages = torch.randn(5, LATENT + ROTARY, dtype=torch.float64)
    keys, values = latent.expand(pages, slice(HEADS), -1)
    for head in range(HEADS):
        own_keys, own_values = latent.expand(pages, slice(head, head + 1), -1)
        torch.testing.assert_close(own_keys[0], keys[head])
        torch.testing.assert_close(own_values[0], values[head])


def test_a_decode_absorbs_and_a_long_prompt_expands() -> None:
    published = LatentWeights(torch.empty(128 * 256, 512), 128, 64, 128)
    assert not published.worth_expanding(1, 4096)
    assert not published.worth_expanding(8, 100_000)
    assert published.worth_expanding(2048, 2048)
    assert published.worth_expanding(2048, 100_000)


WAYS: dict[str, Callable[[LatentWeights, int, int], bool]] = {
    "absorbed": lambda latent, count, context: False,
    "expanded": lambda latent, count, context: True,
    "mixed": lambda latent, count, context: context % 2 == 0,
}


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_gives_the_tokens_of_transformers(
    family: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks beside others that decode, so that one step has both ways."""
    monkeypatch.setattr(LatentWeights, "worth_expanding", WAYS[way])
    engine = core_of(load(family), max_num_batched_tokens=13)
    sampling = Sampling(max_tokens=len(truth(family)["a"]), temperature=0.0, ignore_eos=True)
    prompts = {"b": ids(2, 7), "a": ids(1, 50)}
    found: dict[str, list[int]] = {name: [] for name in prompts}
    for name, tokens in prompts.items():
        request = Request(id=name, prompts=(Prompt.of(Tokens(tokens)),), params=sampling)
        for output in [*engine.admit(request), *engine.step()]:
            found[output.request_id] += output.token_ids
    while len(engine):
        for output in engine.step():
            found[output.request_id] += output.token_ids
    assert found == {name: truth(family)[name] for name in prompts}


def test_a_page_holds_one_latent_a_position_and_nothing_else() -> None:
    model: CausalModel = load("deepseek_v3")
    (layer, _) = model.layers
    assert layer.kept == (1, layer.key_size, 0)
    engine = core_of(model)
    pages = engine.pages
    for keys, values, kept in zip(pages.keys, pages.values, pages.kept, strict=True):
        assert len(kept) == 1
        assert keys.data_ptr() == values.data_ptr() == kept[0].data_ptr()
        assert values.shape[3] < keys.shape[3]
