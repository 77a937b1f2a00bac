"""Attackers on rows whose truth is known: what must be read is read, and guesses are no find."""

import itertools
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inlay.base.errors import InvalidRequestError
from inlay_audit import run
from inlay_audit.attacker import Clock, Known, OutOfTimeError, SentRows, in_order
from inlay_audit.attackers import lookup, nearest, pairs
from inlay_audit.attackers.geometry import Signature
from inlay_audit.attackers.nearest import WhitenedNearest
from inlay_audit.attackers.order import Reordered
from inlay_audit.attackers.sequence import Bigram, ForwardBackward, Prior
from inlay_audit.gate import Gate
from inlay_audit.interval import shares, wilson
from inlay_audit.prompts import AuditPrompt, EntitySpan, Floats, Ids, Template
from inlay_audit.run import Audit, Audited
from inlay_audit.score import METRICS, counts_of
from inlay_audit.transform import Setting, named, natural_level
from inlay_audit.verdict import Verdict, verdict

WORDS, WIDTH = 300, 32
TABLE: Floats = np.random.default_rng(0).normal(0, 0.3, (WORDS, WIDTH)).astype(np.float32)
TEMPLATE = Template(np.arange(3), np.arange(3, 6))


def made(count: int, seed: int, words: int = WORDS) -> list[AuditPrompt]:
    """Prompts whose tokens have frequencies as words do, a third of them names."""
    rng = np.random.default_rng(seed)
    frequent = 1 / np.arange(1, words - 5)
    found = []
    for index in range(count):
        user = 6 + rng.choice(words - 6, size=rng.integers(6, 14), p=frequent / frequent.sum())
        ids = np.concatenate([TEMPLATE.before, user, TEMPLATE.after])
        spans = (EntitySpan(3, 5, name=True),)
        found.append(AuditPrompt(index, ids, 3, len(ids) - 3, spans))
    return found


SETTING = Setting(TABLE, made(200, 2), 5, pytest.fail)


def audited(spec: str, *attackers: str, resends: int = 8) -> Audited:
    audit = Audit(made(60, 1), made(200, 2), TABLE, TEMPLATE, str, attackers, resends)
    return audit.of(named(spec, SETTING))


def read(found: Audited, attacker: str, metric: str = "tokens") -> float:
    (share,) = (each.shares[metric] for each in found.reads if each.attacker == attacker)
    return share.value


def test_rows_of_the_table_are_read_whole() -> None:
    found = audited("none", "nearest", "signature", "procrustes", "least-squares", "bigram")
    for each in found.reads[1:]:
        assert each.shares["tokens"].value == each.shares["exact"].value == 1
        assert each.advantage["tokens"] == 1


def test_a_secret_rotation_falls_to_norms_and_template_without_a_pair() -> None:
    found = audited("rotate", "nearest", "signature", "procrustes")
    assert read(found, "nearest") < 0.1
    assert read(found, "signature") >= 0.99
    assert found.worst_unpaired["tokens"].attacker == "signature"
    assert read(found, "procrustes") >= 0.99


def test_a_secret_permutation_with_signs_falls_to_sorted_values_without_a_pair() -> None:
    found = audited("permute", "nearest", "sorted")
    assert read(found, "nearest") < 0.1
    assert read(found, "sorted") == 1


def test_a_projection_falls_to_pairs() -> None:
    found = audited("project:20", "nearest", "sorted", "least-squares", "procrustes")
    assert set(found.left_out) == {"nearest", "sorted"}
    assert read(found, "least-squares") >= 0.99


def test_noise_sent_again_averages_out() -> None:
    once, often = audited("noise:2", "nearest"), audited("noise:2", "resends", resends=32)
    assert read(often, "resends") > read(once, "nearest") + 0.2
    assert "resends" in audited("none", "resends").left_out
    assert "resends" in audited("noise:2", "resends", resends=1).left_out


def test_shuffled_rows_give_their_tokens_and_then_much_of_their_order() -> None:
    found = audited("shuffle", "nearest", "reordered")
    assert read(found, "nearest", "any-order") == 1
    assert read(found, "reordered", "any-order") == 1
    assert "reordered" in audited("none", "reordered").left_out


def test_dropped_rows_are_read_in_the_order_of_the_others() -> None:
    found = audited("drop:0.5", "nearest", "codebook")
    assert read(found, "nearest") == pytest.approx(0.5, abs=0.06)
    assert "codebook" in found.left_out


def test_rows_that_say_nothing_are_read_no_better_than_guessed_and_the_guess_counts() -> None:
    found = audited("noise:1000", "nearest", "signature", "codebook", "bigram")
    guessed = read(found, "prior")
    assert guessed > 0.1
    # The worst case is over all attackers, guessing among them: no gate passes below it.
    assert found.worst["tokens"].share.value >= guessed
    assert found.worst["tokens"].share.high > guessed
    assert found.worst["names"].share.high < 0.25
    assert Gate({"tokens": guessed}).failures([found])
    assert not Gate({"tokens": 0.9, "names": 0.25}).failures([found])


def test_a_codebook_reads_no_token_that_is_in_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inlay_audit.attacker.MAX_PAIRS", 200)
    found = audited("rotate", "codebook", "procrustes")
    unseen = {each.attacker: each.shares["unseen"] for each in found.reads}
    assert unseen["codebook"].of > 50
    assert unseen["codebook"].value == 0
    assert unseen["procrustes"].value >= 0.99


def known(count: int = 40) -> Known:
    public = made(count, 3)
    return Known(TABLE, TEMPLATE, public, [TABLE[each.ids] for each in public])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 5, WORDS])
def test_the_best_points_are_those_of_a_sort_whatever_the_pieces(
    dtype: type[np.floating[Any]], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(4)
    points = TABLE.astype(dtype)
    rows = (TABLE[rng.integers(0, WORDS, 50)] + rng.normal(0, 0.3, (50, WIDTH))).astype(dtype)
    before = np.where(rng.random(WORDS) < 0.3, -np.inf, rng.normal(0, 3, WORDS)).astype(dtype)
    whole = rows @ points.T - 0.5 * np.square(points).sum(axis=1) + before
    monkeypatch.setattr(lookup, "_TOGETHER", 7)
    monkeypatch.setattr(lookup, "_BLOCK", 41)
    ids, values = lookup.best_points(rows, points, count, before)
    np.testing.assert_allclose(values, -np.sort(-whole, axis=1)[:, :count], rtol=1e-4, atol=1e-5)
    # Of those that are left out one is like the other.
    held = np.isfinite(values)
    assert (ids == np.argsort(-whole, axis=1, kind="stable")[:, :count])[held].all()


@pytest.mark.parametrize("seed", range(8))
def test_a_short_prompt_gets_its_likeliest_order(seed: int) -> None:
    """Four tokens have so few orders that the beam drops none."""
    facts = known(200)
    bigram = Bigram.of(facts)
    inner = [int(each) for each in bigram.ids if each > 5]
    tokens = np.random.default_rng(seed).choice(inner[:12], size=4)

    def score(order: Sequence[int]) -> float:
        whole = [int(TEMPLATE.before[-1]), *order, int(TEMPLATE.after[0])]
        places = [bigram.place(token) for token in whole]
        return float(sum(np.log(bigram.follows[a, b]) for a, b in itertools.pairwise(places)))

    best = max(score(order) for order in itertools.permutations(tokens.tolist()))
    attacker = Reordered(nearest.Nearest())
    shuffled = [each[np.argsort(each[:, 0])] for each in facts.sent]
    attacker.fit(Known(TABLE, TEMPLATE, facts.public, shuffled))
    ids = np.concatenate([TEMPLATE.before, tokens, TEMPLATE.after])
    ((_, guess),) = attacker.guess(SentRows([TABLE[np.sort(ids)]]))
    assert score(guess[3:-3].tolist()) == pytest.approx(best, abs=1e-3)


def test_none_of_n_has_the_upper_limit_of_wilson() -> None:
    assert wilson(0, 200)[1] == pytest.approx(0.0188, abs=1e-4)
    (share,) = shares(np.stack([np.zeros((200, 1)), np.full((200, 1), 25)], axis=2))
    assert (share.value, share.low, share.of) == (0, 0, 5000)
    assert share.high == pytest.approx(0.0188, abs=1e-4)
    (whole,) = shares(np.full((200, 1, 2), 25.0))
    assert (whole.value, whole.high) == (1, 1)
    assert whole.low == pytest.approx(1 - 0.0188, abs=1e-4)
    (wider,) = shares(np.stack([np.zeros((200, 1)), np.full((200, 1), 25)], axis=2), comparisons=9)
    assert wider.high > share.high


@pytest.mark.parametrize("truth", [0.003, 0.02, 0.5])
def test_the_upper_limit_holds_for_things_that_are_alike_within_a_prompt(truth: float) -> None:
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(25):
        of = rng.integers(5, 20, (150, 1))
        hits = of * (rng.random((150, 1)) < truth)
        (share,) = shares(np.stack([hits, of], axis=2).astype(np.float64))
        held += share.high >= truth
    assert held >= 22


def test_entities_count_where_every_token_is_right_and_the_template_never() -> None:
    ids = np.array([0, 1, 2, 9, 8, 7, 6, 3, 4, 5])
    prompt = AuditPrompt(0, ids, 3, 7, (EntitySpan(3, 5, name=True), EntitySpan(5, 7, name=False)))

    def counts(guess: Ids, seen: Sequence[int] = (9, 8, 7, 6)) -> dict[str, list[float]]:
        found = counts_of([prompt], [guess], np.array(seen))[0]
        return dict(zip(METRICS, found.tolist(), strict=True))

    whole = counts(ids)
    assert whole["tokens"] == whole["any-order"] == [4, 4]
    assert whole["names"] == whole["others"] == whole["exact"] == [1, 1]
    half = counts(np.array([0, 1, 2, 9, 8, 7, 1, 3, 4, 5]), (9, 8))
    assert half["tokens"] == [3, 4]
    assert (half["names"], half["others"], half["exact"]) == ([1, 1], [0, 1], [0, 1])
    assert half["unseen"] == [1, 2]
    assert counts(np.array([0, 1, 2, 3, 4, 5]))["any-order"] == [0, 4]
    # Another number of tokens: those that stand in the same order.
    assert counts(np.array([0, 1, 2, 9, 7, 6, 3, 4, 5]))["tokens"] == [3, 4]


def one_norm(count: int, width: int, seed: int) -> Floats:
    """Rows of one norm, but for half a percent, as Gemma's are."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, width))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    found: Floats = (26 * rows * rng.uniform(0.9975, 1.0025, (count, 1))).astype(np.float32)
    return found


def with_a_mean(count: int, width: int, seed: int) -> Floats:
    """Rows whose common part is a hundred times what tells them apart."""
    rng = np.random.default_rng(seed)
    found: Floats = (rng.normal(size=width) + 0.01 * rng.normal(size=(count, width))).astype(
        np.float32
    )
    return found


@pytest.mark.parametrize("make", [one_norm, with_a_mean])
@pytest.mark.parametrize("around", [1, 3])
def test_a_rotation_falls_to_figures_that_hardly_differ(
    make: Callable[[int, int, int], Floats], around: int
) -> None:
    table = make(4096, 64, 5)
    template = Template(np.arange(around), np.zeros(0, np.int64))
    rng = np.random.default_rng(6)
    key = np.linalg.qr(rng.normal(size=(64, 64)))[0]
    ids = np.concatenate([template.before, rng.integers(around, len(table), 500)])
    attacker = Signature()
    attacker.fit(Known(table, template, [], []))
    ((_, guess),) = attacker.guess(SentRows([(table[ids] @ key).astype(np.float32)]))
    assert (guess == ids).mean() > 0.99


def test_tokens_of_one_norm_that_differ_by_rounding_alone_do_not_drown_the_rest() -> None:
    table = one_norm(1024, 64, 7)
    table *= 26 / np.linalg.norm(table, axis=1, keepdims=True)
    template = Template(np.arange(4), np.zeros(0, np.int64))
    key = np.linalg.qr(np.random.default_rng(8).normal(size=(64, 64)))[0]
    attacker = Signature()
    attacker.fit(Known(table, template, [], []))
    ((_, guess),) = attacker.guess(SentRows([(table @ key).astype(np.float32)]))
    assert (guess == np.arange(len(table))).mean() > 0.99


@pytest.mark.parametrize("level", [0.0, 1.0, 2.0, 3.0])
def test_what_public_text_lacks_is_read_as_well_as_by_the_nearest_token(level: float) -> None:
    """A real vocabulary: 6,000 tokens, of which public text has few and the text others."""
    table, words = one_norm(6000, 96, 9), 6000
    public, private = made(150, 10, words), made(60, 11, words)
    seen = np.unique(np.concatenate([each.ids for each in public]))
    tokens = np.concatenate([each.ids[each.start : each.stop] for each in private])
    assert 0.1 < np.isin(tokens, seen, invert=True).mean() < 0.4
    rng = np.random.default_rng(12)
    noise = level * 26 / 96**0.5

    def sent(prompts: list[AuditPrompt]) -> list[Floats]:
        rows = [table[each.ids] for each in prompts]
        return [each + rng.normal(0, noise, each.shape).astype(np.float32) for each in rows]

    known, received = Known(table, TEMPLATE, public, sent(public)), SentRows(sent(private))
    shares = []
    for attacker in (nearest.Nearest(), ForwardBackward(), pairs.LeastSquares()):
        attacker.fit(known)
        found = np.concatenate([each[3:-3] for each in in_order(attacker.guess(received))])
        shares.append(float((found == tokens).mean()))
    assert shares[1] > shares[0] - 0.02
    assert shares[2] > shares[0] - 0.02
    if level >= 2:
        assert shares[1] > shares[0]


def test_equal_rows_of_all_prompts_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [TABLE[prompt.ids] for prompt in made(30, 1)]
    looked: list[int] = []
    alone = lookup.nearest_ids

    def counting(rows: Floats, points: Floats) -> Ids:
        looked.append(len(rows))
        return alone(rows, points)

    monkeypatch.setattr(lookup, "nearest_ids", counting)
    found = in_order(lookup.nearest_of_each(prompts, TABLE))
    assert [mine.tolist() for mine in found] == [alone(rows, TABLE).tolist() for rows in prompts]
    assert looked == [len(np.unique(np.concatenate([prompt.ids for prompt in made(30, 1)])))]


@pytest.mark.thorough
def test_levels_of_noise_compare_across_models() -> None:
    assert natural_level(np.zeros((262_144, 640), np.float32)) == pytest.approx(3.58, abs=0.01)
    assert natural_level(np.zeros((151_936, 1_536), np.float32)) == pytest.approx(5.67, abs=0.01)
    level = 0.5 * natural_level(TABLE)
    (prompt,) = made(1, 1)
    one, other = (
        named(spec, SETTING).send([prompt], [TABLE[prompt.ids]], np.random.default_rng(1))[0]
        for spec in ("noise:0.5x", f"noise:{level}")
    )
    assert np.array_equal(one, other)


@pytest.mark.thorough
def test_a_verdict_says_what_it_took_and_what_was_not_tried() -> None:
    def judged(spec: str, *attackers: str, budget: float = np.inf) -> Verdict:
        audit = Audit(
            made(200, 1), made(200, 2), TABLE, TEMPLATE, str, attackers, budget=budget
        )  # fmt: skip
        return verdict(audit.of(named(spec, SETTING)))

    clean = judged("none", "nearest", "least-squares")
    assert (clean.word, clean.attacker, clean.knows) == ("READ", "nearest", "table")
    assert clean.line().startswith("none: READ. 100 % of tokens [97, 100] by nearest, which knows")
    turned = judged("project:20", "nearest", "least-squares")
    assert (turned.word, turned.attacker) == ("READ WITH PAIRS", "least-squares")
    hidden = judged("noise:100", "nearest", "least-squares", "bigram")
    assert hidden.word == "NOT READ BY THESE"
    assert hidden.not_run == ()
    # What needs pairs would read it: that it did not run is part of the verdict.
    hurried = judged("rotate", "nearest", "least-squares", "procrustes", budget=1e-9)
    assert hurried.word != "READ WITH PAIRS"
    assert hurried.not_run == ("least-squares", "procrustes")
    assert hurried.line().endswith(" Not run: least-squares, procrustes.")


class _TwoBatches(Clock):
    """Time for two batches of rows, whatever a machine takes for them."""

    def __init__(self, until: float) -> None:
        super().__init__(until)
        object.__setattr__(self, "asked", itertools.count())

    def check(self) -> None:
        if next(self.asked):  # type: ignore[attr-defined]
            raise OutOfTimeError


def test_an_attacker_that_runs_is_stopped_at_its_next_batch_and_what_it_read_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "Clock", _TwoBatches)
    monkeypatch.setattr(lookup, "_TOGETHER", 100)
    found = audited("noise:1", "nearest", "whitened", "procrustes")
    (prior, stopped) = found.reads
    assert (prior.texts, found.texts) == (60, 60)
    assert 5 < stopped.texts < 30
    assert stopped.shares["exact"].of == stopped.texts
    assert stopped.shares["tokens"].value > 0.95
    # Its advantage is over what is guessed of the same texts.
    audit = Audit(made(60, 1)[: stopped.texts] * 3, made(200, 2), TABLE, TEMPLATE, str, ())
    guessed = read(audit.of(named("noise:1", SETTING)), "prior")
    share = stopped.shares["tokens"].value
    assert stopped.advantage["tokens"] == pytest.approx((share - guessed) / (1 - guessed))
    assert found.not_run == ("whitened", "procrustes")
    judged = verdict(found)
    assert (judged.word, judged.stopped) == ("READ", {"nearest": stopped.texts})
    assert f" Stopped after {stopped.texts} of 60 texts: nearest. Not run: " in judged.line()
    assert Gate(attackers_required=("nearest",)).unjudged([found], 60) == [
        "noise:1: nearest did not run to the end (--attackers, --budget)"
    ]


def test_an_attacker_is_let_go_before_the_next_one_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before: list[weakref.ref[WhitenedNearest]] = []
    left: list[bool] = []

    class Next(WhitenedNearest):
        def fit(self, known: Known) -> None:
            left.extend(one() is not None for one in before)
            before.append(weakref.ref(self))
            super().fit(known)

    monkeypatch.setattr(run, "chosen", lambda names: [Prior(), Next(), Next(), Next()])
    Audit(made(30, 1), made(60, 2), TABLE, TEMPLATE, str, ()).of(named("none", SETTING))
    assert left == [False] * 3


def test_a_rotation_is_read_from_rows_of_16_bits_by_the_products_among_them() -> None:
    rng = np.random.default_rng(7)
    table = rng.normal(size=(4096, 64)).astype(np.float32)
    # All rows have one norm, but for half a percent, as those of Gemma.
    table *= (1 + 0.005 * rng.normal(size=(4096, 1))) / np.linalg.norm(table, axis=1)[:, None]
    template = Template(np.arange(1), np.arange(0))
    prompts = []
    for index in range(120):
        user = rng.integers(1, 4096, 40)
        prompts.append(AuditPrompt(index, np.concatenate([template.before, user]), 1, 41, ()))
    audit = Audit(
        prompts[:60], prompts[60:], table, template, str, ("signature", "gram"), dtype="bfloat16"
    )
    found = audit.of(named("rotate", Setting(table, prompts[60:], 5, pytest.fail)))
    assert read(found, "signature") < 0.5
    assert read(found, "gram") >= 0.99


def test_rows_that_a_dtype_does_not_hold_are_said() -> None:
    audit = Audit(
        made(60, 1), made(200, 2), TABLE * 1e6, TEMPLATE, str, ("nearest",), dtype="float16"
    )
    with pytest.raises(InvalidRequestError, match="infinite in float16"):
        audit.of(named("none", SETTING))


def test_a_gate_fails_what_passes_a_bound_and_says_what_cannot_be_judged(tmp_path: Path) -> None:
    found = audited("none", "nearest")
    file = tmp_path / "gate.yaml"
    file.write_text(
        "fail-above: {tokens: 0.05}\nleast_texts: 500\nattackers-required: [nearest, gram]\n"
        "answers-kept-at-least: 0.9\n"
    )
    gate = Gate.of(["names=0.3"], file)
    assert [line.split(":")[1] for line in gate.failures([found])] == [" tokens", " names"]
    assert gate.unjudged([found], 60) == [
        "60 texts were read, least-texts is 500",
        "none: gram did not run to the end (--attackers, --budget)",
        "none: answers were not compared (--answers, --url)",
    ]


def test_where_no_attacker_read_a_row_in_time_nothing_passes() -> None:
    found = audited("noise:100", "nearest")
    prior = tuple(read for read in found.reads if read.attacker == "prior")
    untried = replace(found, reads=prior, not_run=("nearest",), worst=found.worst_unpaired)
    of_prior = {
        metric: replace(worst, attacker="prior") for metric, worst in untried.worst_unpaired.items()
    }
    untried = replace(untried, worst=of_prior, worst_unpaired=of_prior)
    assert verdict(found).word != "NOT TRIED"
    assert verdict(untried).word == "NOT TRIED"
    gate = Gate.of(["tokens=1"], None)
    assert gate.unjudged([found], 60) == []
    assert gate.unjudged([untried], 60) == ["noise:100: no attacker read a row in time (--budget)"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fail_above: {words: 0.1}", "a metric of tokens"),
        ("fail_above: {tokens: 3}", "a share from 0 to 1"),
        ("fail_above: 3", "Expected `object`"),
        ("texts: 3", "unknown field `texts`"),
        ("attackers-required: [magic]", "no attacker 'magic'"),
        ("answers-kept-at-least: 95", "a share from 0 to 1, got 95"),
        ("a: [", "while parsing"),
    ],
)
def test_a_gate_that_is_none_is_said_with_its_file(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text(text)
    with pytest.raises(InvalidRequestError, match=f"gate.yaml: (.|\n)*{re.escape(said)}"):
        Gate.of([], file)
