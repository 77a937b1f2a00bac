"""Attackers and transforms that have the whole model, on the demo's."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripts.demo_training.audit_texts import lines
from scripts.demo_training.world import build_world
from transformers import DynamicCache

from inlay import demo
from inlay.base.errors import InvalidRequestError
from inlay.client import PromptEmbedder
from inlay_audit.attackers import lookup
from inlay_audit.neural import candidates, inverter, learned
from inlay_audit.neural.language_model import LanguageModel, ModelAnswers
from inlay_audit.prompts import Floats, Ids, PromptMaker, read_texts
from inlay_audit.report import chart
from inlay_audit.run import Audit, Audited
from inlay_audit.transform import Setting, named
from tests.cli.test_convert_model import run_printed
from tests.gguf_models import gguf_of
from tests.models import tiny

ANSWER = 6


@pytest.fixture(scope="module")
def audit() -> Audit:
    directory = demo.model_dir()
    embedder = PromptEmbedder.from_pretrained(str(directory))
    maker = PromptMaker(embedder)
    prompts = maker.prompts(read_texts("\n".join(lines(build_world(7), 71, 140)).encode(), "texts"))
    # Short ones, whose tokens are computed one by one.
    prompts.sort(key=lambda prompt: len(prompt.ids))
    model = LanguageModel.load(directory)
    here = ModelAnswers(model, embedder.renderer.decode, ANSWER)
    return Audit(
        prompts[:20],
        prompts[20:],
        embedder.table.rows(np.arange(embedder.table.shape[0])).astype(np.float32),
        maker.template,
        embedder.renderer.decode,
        (),
        resends=1,
        ask=here,
        diverge=here.divergence,
        model=lambda: model,
    )


def audited(audit: Audit, spec: str, *attackers: str) -> Audited:
    assert audit.model is not None
    setting = Setting(audit.table, audit.public, 0, audit.model)
    return replace(audit, attackers=attackers).of(named(spec, setting))


def tokens(found: Audited) -> dict[str, float]:
    return {read.attacker: read.shares["tokens"].value for read in found.reads}


@pytest.mark.thorough
def test_hidden_states_are_read_whole_by_computing_them(audit: Audit) -> None:
    found = audited(audit, "hidden:2", "nearest", "hidden-search")
    assert tokens(found)["nearest"] < 0.2
    assert tokens(found)["hidden-search"] == 1
    assert found.unanswered == "the rows enter the model behind its first layer"


def test_a_search_computes_no_layer_behind_the_one_that_was_sent(audit: Audit) -> None:
    assert audit.model is not None
    model = audit.model()
    layers = model.module.base_model.layers
    ran: list[int] = []
    hooks = [
        layer.register_forward_hook(lambda *_, place=place: ran.append(place))
        for place, layer in enumerate(layers)
    ]
    rows = [audit.table[audit.prompts[0].ids]]
    (_, states), *_ = model.hidden_states(rows)
    ran.clear()
    found = model.states_of(1, inputs_embeds=torch.from_numpy(rows[0])[None])
    for hook in hooks:
        hook.remove()
    assert ran == [0, 1]
    assert torch.allclose(found[0], torch.from_numpy(states[1]), atol=1e-5)
    last = model.states_of(len(layers) - 1, inputs_embeds=torch.from_numpy(rows[0])[None])
    assert torch.allclose(last[0], torch.from_numpy(states[-1]), atol=1e-5)


@pytest.mark.thorough
def test_a_gguf_file_is_read_once_the_printed_command_has_converted_it(tmp_path: Path) -> None:
    file = gguf_of(tiny("llama"), tmp_path / "small one.gguf")
    with pytest.raises(InvalidRequestError, match="is GGUF") as refused:
        LanguageModel.load(file)
    run_printed(refused.value.message)
    assert (
        LanguageModel.load(file.with_suffix("")).layers == LanguageModel.load(tiny("llama")).layers
    )


@pytest.mark.parametrize("family", ["gemma3_text", "llama"])
def test_states_of_a_layer_are_the_same_one_token_at_a_time(family: str) -> None:
    model = LanguageModel.load(tiny(family))
    ids = torch.arange(5, 45)[None]
    with torch.inference_mode():
        whole = model.module(ids, output_hidden_states=True).hidden_states
    for layer in range(model.layers):
        # Of a cache whose later layers stay empty, also where layers differ in what they look at.
        cache = DynamicCache(config=model.module.config.get_text_config())
        pieces = [ids[:, :3], *(ids[:, place : place + 1] for place in range(3, 40))]
        states = [model.states_of(layer, input_ids=some, past_key_values=cache) for some in pieces]
        assert torch.allclose(torch.cat(states, dim=1), whole[1 + layer], atol=1e-3)


def test_the_head_is_computed_at_answers_alone(audit: Audit) -> None:
    assert audit.model is not None
    model = audit.model()
    rows = [audit.table[prompt.ids] for prompt in audit.prompts[:3]]
    answers = model.answers(rows, ANSWER)
    shapes: list[int] = []
    hook = model.module.lm_head.register_forward_hook(
        lambda module, given, output: shapes.append(output.shape[1])
    )
    said = dict(model.log_probabilities(rows, answers))
    hook.remove()
    assert [len(said[index]) for index in range(3)] == [len(each) + 1 for each in answers]
    assert max(shapes) == max(map(len, answers)) + 1


def test_other_tokens_that_are_drawn_stand_for_all(
    audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = audit.public[:4]
    rows = [audit.table[prompt.ids] for prompt in prompts]
    batch = inverter.batch_of(prompts, rows, 1.0)
    torch.manual_seed(1)
    longest = max(map(len, rows))
    network = inverter.InverterNetwork(rows[0].shape[1], audit.table, longest)
    rng = np.random.default_rng(0)
    with torch.no_grad():
        whole = float(inverter.loss_of(network, batch, rng))
        monkeypatch.setattr(inverter, "_SAMPLED", len(audit.table) // 6)
        drawn = [float(inverter.loss_of(network, batch, rng)) for _ in range(50)]
    assert np.std(drawn) > 0
    assert np.mean(drawn) == pytest.approx(whole, rel=0.02)


def test_rows_that_are_no_states_are_not_searched(audit: Audit) -> None:
    left_out = audited(audit, "noise:2", "hidden-search").left_out
    assert left_out == {"hidden-search": "the rows are no hidden states of a layer"}


def test_a_rotation_folded_into_the_weights_keeps_every_answer_and_falls(audit: Audit) -> None:
    found = audited(audit, "rotate:folded", "nearest", "beam")
    assert found.answers is not None
    assert found.answers.same.value == 1
    assert found.answers.divergence == pytest.approx(0, abs=1e-4)
    assert tokens(found)["nearest"] < 0.1
    assert tokens(found)["beam"] > 0.99


def test_noise_is_read_better_with_the_model_than_by_the_nearest_token(audit: Audit) -> None:
    found = audited(audit, "noise:4", "nearest", "beam")
    assert found.answers is not None
    assert found.answers.divergence is not None
    assert found.answers.divergence > 1
    assert tokens(found)["beam"] > tokens(found)["nearest"] > tokens(found)["prior"]


@pytest.mark.thorough
def test_context_tells_noisy_rows_apart_without_a_pair(audit: Audit) -> None:
    found = audited(audit, "noise:4", "nearest", "context")
    assert tokens(found)["context"] > tokens(found)["nearest"] + 0.2
    assert found.worst_unpaired["tokens"].attacker == "context"
    # No text that an attacker knows is needed: what it read does not change with them.
    fewer = replace(audit, public=audit.public[:20])
    assert tokens(audited(fewer, "noise:4", "context"))["context"] > tokens(found)["nearest"] + 0.2
    # Under a key and without noise there is nothing to choose among, and no model is run for it.
    for spec, said in (("rotate", "there is a key"), ("shuffle", "there is no noise")):
        assert said in audited(audit, spec, "context").left_out["context"]


@pytest.mark.parametrize("name", ["inverter", "context", "hidden-search"])
def test_what_computes_with_networks_stops_within_its_work(audit: Audit, name: str) -> None:
    spec = "hidden:2" if name == "hidden-search" else "noise:4"
    found = audited(replace(audit, budget=1e-9, ask=None), spec, name, "nearest")
    assert found.not_run == (name, "nearest")
    assert [each.attacker for each in found.reads] == ["prior"]


def wide(words: int, width: int) -> Floats:
    """A table whose rows have unlike norms, and whose last row is its first."""
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(words, width)) * rng.uniform(0.5, 1.5, (words, 1))
    rows[-1] = rows[0]
    return rows.astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("level", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("count", [1, 32, 200])
def test_candidates_in_16_bits_hold_the_nearest_points(
    dtype: type[np.floating[Any]], level: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last block is smaller than the others.
    points = wide(20_000, 48).astype(dtype)
    rng = np.random.default_rng(5)
    ids = np.concatenate([[0], rng.integers(0, len(points), 63)])
    rows = (points[ids] + level * rng.normal(size=(64, 48))).astype(dtype)
    before = np.where(rng.random(len(points)) < 0.1, -np.inf, 0).astype(dtype)
    before[[0, -1]] = 0
    monkeypatch.setattr(lookup, "LARGE_TABLE", 1 << 30)
    whole, scores = lookup.best_points(rows, points, count, before)
    asked: list[int] = []

    def find(*given: Any) -> tuple[Ids, Ids] | None:
        pairs = candidates.find(*given)
        assert pairs is not None
        asked.append(len(pairs[0]))
        return pairs

    monkeypatch.setattr(candidates, "_MOST", len(points))
    monkeypatch.setattr(lookup, "LARGE_TABLE", 1)
    monkeypatch.setattr(lookup, "_candidates", lambda: find)
    found, values = lookup.best_points(rows, points, count, before)
    assert count * len(rows) <= asked[0] < 0.5 * len(rows) * len(points)
    np.testing.assert_allclose(values, scores, rtol=1e-4, atol=1e-3)
    assert (found[:, 0] == whole[:, 0]).all()
    # Of equals it is the first.
    assert level > 0 or found[0, 0] == 0
    # But for ties within rounding.
    assert np.mean(found == whole) > 0.999


def test_points_that_16_bits_do_not_tell_apart_are_all_looked_at() -> None:
    points = np.ones((20_000, 8), np.float32) + 1e-4 * wide(20_000, 8)
    halves = 0.5 * np.square(points).sum(axis=1)
    reach = float(np.sqrt(2 * halves.max()))
    assert candidates.find(points[:64], points, -halves, reach, 1) is None


@pytest.mark.slow
def test_an_inverter_learns_a_key_that_the_nearest_token_misses(
    audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inverter, "_STEPS", 50)
    found = audited(audit, "rotate", "inverter", "nearest")
    assert tokens(found)["inverter"] > tokens(found)["prior"] + 0.1
    assert tokens(found)["nearest"] < 0.1


@pytest.mark.slow
def test_a_learned_transform_is_repeatable_and_moves_the_users_rows_alone(
    audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned, "_STEPS", 3)
    rows = [audit.table[prompt.ids] for prompt in audit.prompts]
    sent: list[Sequence[Floats]] = []
    for _ in range(2):
        assert audit.model is not None
        transform = named("learned:2", Setting(audit.table, audit.public, 3, audit.model))
        sent.append(transform.send(audit.prompts, rows, np.random.default_rng(0)))
    for prompt, one, other, own in zip(audit.prompts, *sent, rows, strict=True):
        assert np.array_equal(one, other)
        moved = np.abs(one - own).max(axis=1) > 0
        assert moved.nonzero()[0].tolist() == list(range(prompt.start, prompt.stop))


def test_answers_do_not_depend_on_those_beside_them(audit: Audit) -> None:
    assert audit.model is not None
    model = audit.model()
    rows = [audit.table[prompt.ids] for prompt in (*audit.prompts[:3], *audit.public[-3:])]
    together = model.answers(rows, ANSWER)
    assert [model.answers([each], ANSWER)[0] for each in rows] == together
    for index, said in model.log_probabilities(rows, together):
        best = torch.argmax(said[:-1], dim=-1).tolist()
        assert best == together[index]


def test_the_picture_is_xml_with_a_bar_for_every_share(audit: Audit) -> None:
    found = [audited(audit, spec, "nearest") for spec in ("none", "noise:4")]
    root = ElementTree.fromstring(chart(found))
    bars = [each for each in root.iter() if each.tag.endswith("rect") and "fill" in each.attrib]
    # Tokens and names by prior, nearest and worst, and the answers, of each transform.
    assert len(bars) == 2 * (2 * 3 + 1)
    assert all(0 <= float(each.attrib["width"]) <= 400 for each in bars)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("hidden:9", "the model has layers 1 to 4"),
        ("hidden:1.5", "the model has layers 1 to 4"),
        ("rotate:fold", "it is rotate or rotate:folded"),
        ("learned:-1", "a number from 0 to 100"),
    ],
)
def test_what_is_no_transform_is_refused(audit: Audit, spec: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        audited(audit, spec)
