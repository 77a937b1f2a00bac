"""Tokenizer of a model directory: `tokenizer.json`, and additions of `tokenizer_config.json`.

The rules are those of a fast tokenizer of transformers (5.23): tokens that the configuration names
and the file lacks are added; `add_bos_token` and `add_eos_token` have no effect, because the file
defines the special tokens around a text; truncation and padding in the file are switched off.
"""

from codecs import BOM_UTF8
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
from tokenizers import AddedToken, Tokenizer

from inlay.base.errors import InvalidRequestError
from inlay.tensors.checkpoint import checkpoint_of, json_of


class LoadedTokenizer(NamedTuple):
    """A tokenizer, its special tokens by their names in templates ("bos_token"), its config."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    config: dict[str, Any]


_Stamp: TypeAlias = list[tuple[int, int] | None]

_kept: dict[Path, tuple[_Stamp, LoadedTokenizer]] = {}
"""Tokenizers that `keep_tokenizer` has read, until each is loaded."""


def keep_tokenizer(directory: Path) -> None:
    """Read a tokenizer now that is loaded later: the next `load_tokenizer` takes it.

    Unless its files have changed. Raises as `load_tokenizer`.
    """
    _kept[directory.resolve()] = _stamp(directory), _read(directory)


def load_tokenizer(directory: Path) -> LoadedTokenizer:
    """Read the tokenizer of a model directory; it is the caller's own.

    Raises:
        InvalidRequestError: there is none, or it cannot be read.
    """
    stamp, kept = _kept.pop(directory.resolve(), ([], None))
    return _read(directory) if kept is None or stamp != _stamp(directory) else kept


def _stamp(directory: Path) -> _Stamp:
    """Return when the files that `_read` reads were changed, and their sizes."""
    names = ("", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    found: _Stamp = []
    for name in names:
        try:
            status = (directory / name).stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_mtime_ns, status.st_size))
    return found


def _read(directory: Path) -> LoadedTokenizer:
    path = directory / "tokenizer.json"
    form = checkpoint_of(directory).file(path.name)
    if form is None:
        where = repr(str(directory))
        raise InvalidRequestError(
            f"{directory} has no tokenizer.json. If the model has another kind of tokenizer, "
            f"convert it once: transformers.AutoTokenizer.from_pretrained({where})"
            f".save_pretrained({where})",
            param="model",
        )
    try:
        tokenizer = Tokenizer.from_buffer(form.removeprefix(BOM_UTF8))
    except Exception as error:  # the library raises bare Exception
        raise InvalidRequestError(f"cannot read {path}: {error}", param="model") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _config_of(directory)
    special_tokens = _special_tokens(config)
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    try:
        tokenizer.add_tokens(_missing(known, config, special_tokens))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"{directory / 'tokenizer_config.json'} describes added tokens wrongly: {error!r}",
            param="model",
        ) from error
    return LoadedTokenizer(tokenizer, special_tokens, config)


class _AddedToken(msgspec.Struct):
    content: str


class _Form(msgspec.Struct):
    """Parts of a `tokenizer.json` that `load_tokenizer` may change."""

    added_tokens: list[_AddedToken]
    truncation: object = None
    padding: object = None


def tokenizer_text(directory: Path) -> str:
    """The tokenizer of a model directory as the text of one `tokenizer.json`.

    The file itself where `load_tokenizer` adds nothing to it: not reading a vocabulary of 150,000
    and writing it again saves 0.5 s.

    Raises:
        InvalidRequestError: as `load_tokenizer`.
    """
    form = (checkpoint_of(directory).file("tokenizer.json") or b"").removeprefix(BOM_UTF8)
    # What is wrong, `load_tokenizer` says.
    with suppress(AttributeError, KeyError, RecursionError, TypeError, ValueError):
        own = msgspec.json.decode(form, type=_Form)
        if own.truncation is None and own.padding is None:
            config = _config_of(directory)
            known = {token.content for token in own.added_tokens}
            if not _missing(known, config, _special_tokens(config)):
                return form.decode().lstrip()
    return load_tokenizer(directory).tokenizer.to_str()


def _config_of(directory: Path) -> dict[str, Any]:
    config = _object_of(directory, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config = {**config, **_object_of(directory, "special_tokens_map.json")}
    return config


def _object_of(directory: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of a model; empty if there is no such file."""
    value = json_of(directory, name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"{directory / name} must hold an object, got {type(value).__name__}", param="model"
        )
    return value


def _content(token: object) -> str | None:
    """Return the text of a token in a configuration: a string, or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        named |= extra
    contents = {name: _content(token) for name, token in named.items()}
    return {name: content for name, content in contents.items() if content is not None}


def _missing(
    known: Container[str], config: dict[str, Any], special_tokens: dict[str, str]
) -> list[AddedToken]:
    """Return the tokens of the configuration that are not among the `known` added ones."""
    missing: dict[str, AddedToken] = {}
    for _, token in sorted(
        config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])
    ):
        missing[token["content"]] = AddedToken(**token)
    listed = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    others = list(special_tokens.values())
    if isinstance(listed, list):
        others += [content for content in map(_content, listed) if content is not None]
    for content in others:
        missing.setdefault(content, AddedToken(content, special=True))
    return [token for content, token in missing.items() if content not in known]
