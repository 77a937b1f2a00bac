"""API keys: which are accepted, from where, until when, and whose they are."""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from inlay.base.errors import AuthenticationError, InvalidRequestError
from inlay.http import FrontendSettings
from inlay.http.callers.auth import ApiKeys, Caller
from inlay.http.callers.keys import ClientLimits, read_keys

SECRET_KEY = "sk-do-not-show-me-0123456789"
NOON = 1_800_000_000.0


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


def keys_of(now: float = NOON, **settings: Any) -> ApiKeys:
    return ApiKeys(FrontendSettings(**settings), clock=lambda: now)


def written(path: Path, entries: object) -> Path:
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    path.chmod(0o600)
    return path


def caller(keys: ApiKeys, key: str) -> Caller:
    return keys.check(bearer(key))


def test_without_keys_anyone_may_ask_and_nobody_is_an_admin() -> None:
    keys = keys_of()
    assert keys.check(None) == keys.check(bearer("x")) == Caller(keys.check(None).tenant)
    assert (keys.check(None).tenant.id, keys.check(None).tenant.salt, keys.required) == (
        "",
        None,
        False,
    )


@pytest.mark.parametrize(
    "authorization",
    [None, b"", b"one", b"Bearer", b"Bearer ", b"Bearer on", b"Bearer one1", b"Bearer ONE", b"Basic one", b"Bearer \xff"],
)  # fmt: skip
def test_a_missing_or_wrong_key_is_refused(authorization: bytes | None) -> None:
    with pytest.raises(AuthenticationError) as raised:
        keys_of(api_key=["one", "two"]).check(authorization)
    assert "one" not in raised.value.message.replace("one1", "")


def test_keys_are_tenants_of_their_own_from_the_second_on() -> None:
    assert caller(keys_of(api_key=["one"]), "one").tenant.salt is None
    keys = keys_of(api_key=["one", "two"])
    one, two = caller(keys, "one").tenant, caller(keys, "two").tenant
    assert one.id != two.id
    assert (one.salt, two.salt) == (one.id, two.id)
    shared = keys_of(api_key=["one", "two"], share_prefix_cache=True)
    assert caller(shared, "one").tenant.salt is None
    assert caller(shared, "one").tenant.id == one.id


def test_a_key_that_is_given_twice_is_one_key() -> None:
    keys = keys_of(api_key=["one", "one"], admin_api_key=["one"])
    assert caller(keys, "one") == Caller(caller(keys, "one").tenant, admin=True)
    assert caller(keys, "one").tenant.salt is None


def test_a_file_gives_names_rights_and_shares(tmp_path: Path) -> None:
    path = written(
        tmp_path / "keys.yaml",
        f"""
        - {{name: alice, key: one, rate: 30, max_requests: 2, max_bytes: 1000000}}
        - {{name: bob, sha256: {hashlib.sha256(b"two").hexdigest()}, admin: true}}
        - {{name: carol, key: 0123456, expires: 2030-01-01}}
        """,
    )
    keys = keys_of(api_key_file=path)
    assert caller(keys, "one").tenant.id == caller(keys, "one").tenant.salt == "alice"
    assert caller(keys, "one").share == ClientLimits(30, 2, 1_000_000)
    assert (caller(keys, "two").tenant.id, caller(keys, "two").admin) == ("bob", True)
    assert caller(keys, "0123456").tenant.id == "carol"


def test_a_json_file_says_the_same(tmp_path: Path) -> None:
    entries = [
        {
            "name": "alice",
            "key": "one",
            "rate": 1.5,
            "admin": True,
            "expires": "2030-01-01T00:00:00Z",
        }
    ]
    path = written(tmp_path / "keys.json", entries)
    found = caller(keys_of(api_key_file=path), "one")
    assert (found.tenant.id, found.admin, found.share.rate) == ("alice", True, 1.5)


def test_the_only_key_of_a_file_is_kept_apart_as_another_may_come(tmp_path: Path) -> None:
    path = written(tmp_path / "keys.json", [{"name": "alice", "key": "one"}])
    assert caller(keys_of(api_key_file=path), "one").tenant.salt == "alice"
    assert caller(keys_of(api_key_file=path, share_prefix_cache=True), "one").tenant.salt is None


def test_two_keys_of_a_name_are_one_tenant(tmp_path: Path) -> None:
    path = written(
        tmp_path / "k.json", [{"name": "alice", "key": "old"}, {"name": "alice", "key": "new"}]
    )
    keys = keys_of(api_key_file=path)
    assert caller(keys, "old").tenant == caller(keys, "new").tenant


def test_a_key_is_good_until_it_expires(tmp_path: Path) -> None:
    path = written(
        tmp_path / "keys.json", [{"name": "a", "key": "one", "expires": "2027-01-15T08:00:00"}]
    )
    assert caller(keys_of(NOON - 1, api_key_file=path), "one").tenant.id == "a"
    with pytest.raises(AuthenticationError, match="expired"):
        caller(keys_of(NOON, api_key_file=path), "one")


BAD = {
    "nothing": ("[]", "holds no key"),
    "empty": ("", "must be a list"),
    "no list": ("name: a", "must be a list of entries, got dict"),
    "no entry": ("- a", "entry 1: Expected `object`"),
    "no name": (f"- key: {SECRET_KEY}", "missing required field `name`"),
    "no key": ("- name: a", "exactly one of key and sha256"),
    "both": (f"- {{name: a, key: {SECRET_KEY}, sha256: '{'0' * 64}'}}", "exactly one of key and sha256"),
    "no digest": ("- {name: a, sha256: abc}", "64 hex digits"),
    "a space in a key": (f"- {{name: a, key: {SECRET_KEY} b}}", "visible ASCII"),
    "an unknown field": (f"- {{name: a, key: {SECRET_KEY}, ratee: 5}}", "unknown field 'ratee'; known: name, key"),
    "a key for a field": (f"- {{name: a, {SECRET_KEY}: key}}", "unknown field; known"),
    "an odd name": ("- {name: 'a b', key: x}", "a name is"),
    "a reserved name": ("- {name: key-1, key: x}", "a name is"),
    "no rate": ("- {name: a, key: x, rate: 0}", "rate must be more than 0, got 0"),
    "an endless rate": ("- {name: a, key: x, rate: .inf}", "rate"),
    "a share below 0": ("- {name: a, key: x, max_bytes: -1}", "max_bytes must be more than 0, got -1"),
    "a word for a number": (f"- {{name: a, key: x, rate: {SECRET_KEY}}}", "Expected `float"),
    "a word for a switch": ("- {name: a, key: x, admin: maybe}", "Expected `bool`"),
    "no time": (f"- {{name: a, key: x, expires: {SECRET_KEY}}}", "ISO 8601"),
    "other limits": ("- {name: a, key: x, rate: 1}\n- {name: a, key: y, rate: 2}", "entry 2 (a): other limits"),
    "a key twice": ("- {name: a, key: x}\n- {name: b, key: x}", "the key of an earlier entry"),
    "no YAML": (f"- name: a\n  key: {SECRET_KEY}: [", "not valid YAML at line 2"),
    "an alias": (f"- *{SECRET_KEY}", "not valid YAML at line 1"),
    "a control": ("- name: \x01", "not valid text"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_not_as_it_should_be_is_refused_without_showing_a_key(
    tmp_path: Path, case: str
) -> None:
    text, phrase = BAD[case]
    path = written(tmp_path / "keys.yaml", text)
    with pytest.raises(InvalidRequestError) as raised:
        read_keys(path)
    assert phrase in raised.value.message
    assert str(path) in raised.value.message
    assert SECRET_KEY not in raised.value.message


def test_a_json_file_that_is_none_says_where(tmp_path: Path) -> None:
    path = written(tmp_path / "keys.json", '[\n{"key": "' + SECRET_KEY + '" x}]')
    with pytest.raises(InvalidRequestError, match="not valid JSON at line 2") as raised:
        read_keys(path)
    assert SECRET_KEY not in raised.value.message


def test_a_file_that_is_not_there_or_has_a_key_of_the_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="No such file"):
        keys_of(api_key_file=tmp_path / "none.yaml")
    path = written(tmp_path / "keys.json", [{"name": "a", "key": "one"}])
    with pytest.raises(InvalidRequestError, match="have the same key"):
        keys_of(api_key=["one"], api_key_file=path)


@pytest.mark.parametrize("key", ["", " ", "one ", "käse"])
def test_a_key_that_no_header_could_carry_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="ASCII"):
        keys_of(api_key=[key])


def test_settings_do_not_show_keys() -> None:
    settings = FrontendSettings(api_key=[SECRET_KEY], admin_api_key=[SECRET_KEY])  # type: ignore[list-item]
    assert SECRET_KEY not in repr(settings) + str(settings) + settings.model_dump_json()


async def test_a_changed_file_is_read_again_and_a_broken_one_leaves_the_old_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "keys.yaml", "- {name: a, key: one}")
    keys = keys_of(api_key_file=path)
    written(path, "- {name: a, key: new}")
    await keys.files.reload()
    assert caller(keys, "new").tenant.id == "a"
    with pytest.raises(AuthenticationError):
        caller(keys, "one")
    for broken in ("- {name: a, key: third, rat: 5}", "[]"):
        written(path, broken)
        caplog.clear()
        await keys.files.reload()
        assert caller(keys, "new").tenant.id == "a"
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "were not reloaded" in caplog.text
    path.unlink()
    await keys.files.reload()
    assert caller(keys, "new").tenant.id == "a"


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
@pytest.mark.parametrize(
    ("mode", "warning"),
    [(0o600, None), (0o640, None), (0o644, "may read it"), (0o660, "may write to it")],
)
def test_a_file_open_to_others_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warning: str | None
) -> None:
    path = written(tmp_path / "keys.yaml", f"- {{name: a, key: {SECRET_KEY}}}")
    path.chmod(mode)
    with caplog.at_level(logging.INFO):
        keys_of(api_key_file=path)
    warnings = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert warnings == [] if warning is None else warning in warnings[0]
    assert SECRET_KEY not in caplog.text


def test_the_file_shown_in_the_documentation_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    path = written(tmp_path / "keys.yaml", page.split("```yaml\n")[1].split("```")[0])
    keys = keys_of(api_key_file=path)
    assert caller(keys, "sk-alice-old").tenant == caller(keys, "sk-alice-new").tenant
    assert caller(keys, "sk-batch").share.max_requests == 8
    assert caller(keys, "sk-operator").admin
