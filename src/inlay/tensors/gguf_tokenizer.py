"""The tokenizer of a GGUF file in the form of `tokenizer.json` and `tokenizer_config.json`.

The file names how text is split and does not say it: the splits and normalisers are those of the
published tokenizers that llama.cpp's converter knows by that name (`convert_hf_to_gguf_update.py`).
A name that is not known here is refused, as another split changes ids without a word.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from operator import itemgetter
from typing import Any

from inlay.base.errors import InvalidRequestError
from inlay.tensors.tensor import quoted

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"

_END_NAMES = frozenset(
    {
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end|>", "<end_of_turn>",
        "<|return|>", "<|call|>",
    }
)  # fmt: skip
"""Control tokens that end a turn or a text, whatever a file says of its end token."""
_CHANNEL_ENDS = ("<|return|>", "<|call|>")
"""Tokens beside which <|end|> ends a message of a turn, after which another may follow."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Split:
    """Preparation of text for byte-level BPE.

    Attributes:
        regex: of the pieces; None for that of GPT-2.
        digits: each digit is a piece.
        normaliser: None or the name of one.
        whole: a piece that is a token is not merged.
        begins: a text begins with a token unless the file says otherwise.
    """

    regex: str | None = None
    digits: bool = False
    normaliser: str | None = None
    whole: bool = False
    begins: bool = False


_LLAMA3 = _Split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", whole=True, begins=True)
_GPT2 = _Split()
SPLITS = {
    "gpt-2": _GPT2,
    "gpt-4o": _Split(
        "|".join([*(f"{word}{_CONTRACTIONS}?" for word in _CASED), r"\p{N}{1,3}", _CASED_REST]),
        whole=True,
    ),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _Split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}", normaliser="NFC"),
    "smollm": _Split(digits=True),
    "tekken": _Split("|".join([*_CASED, r"\p{N}", _CASED_REST]), whole=True, begins=True),
}
"""By pre-tokenizer name; vocabularies of SentencePiece need none."""


class GgufTokenizer:
    """The tokenizer that a file's metadata describe.

    Attributes:
        end_tokens: ids that end a text or a turn, that of the file first.
    """

    def __init__(self, path: object, metadata: Mapping[str, Any]) -> None:
        """Check what `metadata` says.

        Raises:
            InvalidRequestError: a tokenizer that is not read, or one that contradicts itself.
        """
        self._path = path
        self._metadata = metadata
        self._runs: set[int] = set()
        self._kind: str = self._get("model", str, None)
        if self._kind not in ("gpt2", "llama"):
            raise self._refused(
                f"its tokenizer is of kind {quoted(str(self._kind))}; read are gpt2 and llama"
            )
        self._tokens: list[str] = self._texts("tokens")
        self._types: list[int] = self._get("token_type", list, [_NORMAL] * len(self._tokens))
        if len(self._types) != len(self._tokens):
            raise self._refused(f"it has {len(self._tokens)} tokens and {len(self._types)} types")
        # Few, where nearly all of some 200,000 are normal.
        self._special = [index for index, kind in enumerate(self._types) if kind != _NORMAL]
        self._split = self._split_of() if self._kind == "gpt2" else None
        if self._split is None:
            self._keep_runs_of_spaces()
        self.end_tokens = self._end_tokens()

    def _refused(self, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self._path} cannot be served: {why}", param="model")

    def _get(self, name: str, kind: type, default: Any) -> Any:
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self._refused(f"{_PREFIX}{name} is a {type(value).__name__}, not {kind.__name__}")
        return value

    def _texts(self, name: str) -> list[str]:
        found: list[Any] = self._get(name, list, [])
        if not found or not isinstance(found[0], str):
            raise self._refused(f"it has no texts in {_PREFIX}{name}")
        return found

    def _split_of(self) -> _Split:
        name = self._get("pre", str, "")
        if name not in SPLITS:
            raise self._refused(
                f"its text is split in the way {quoted(name)}, and those known are "
                f"{', '.join(sorted(SPLITS))}"
            )
        return SPLITS[name]

    def _keep_runs_of_spaces(self) -> None:
        """Have the tokens of several spaces found in normalised text, where spaces are marks."""
        self._runs = {
            index
            for index in self._special
            if self._types[index] == _USER_DEFINED
            and (token := self._tokens[index])
            and not token.strip(f" {_SPACE}")
        }
        if self._runs:
            self._tokens = [*self._tokens]
        for index in self._runs:
            self._tokens[index] = self._tokens[index].replace(" ", _SPACE)

    def _id(self, name: str) -> int | None:
        """Return the id of a special token; None where the file names none."""
        found: int | None = self._get(f"{name}_token_id", int, None)
        if found is not None and not 0 <= found < len(self._tokens):
            raise self._refused(
                f"{_PREFIX}{name}_token_id is {found}, of {len(self._tokens)} tokens"
            )
        return found

    def _end_tokens(self) -> list[int]:
        named = [found for name in ("eos", "eot", "eom") if (found := self._id(name)) is not None]
        by_name = {
            token: index
            for index in self._special
            if self._types[index] == _CONTROL and (token := self._tokens[index]) in _END_NAMES
        }
        if all(token in by_name for token in _CHANNEL_ENDS):
            by_name.pop("<|end|>", None)
        return [*dict.fromkeys([*named, *by_name.values()])]

    def config(self) -> dict[str, Any]:
        """The content of `tokenizer_config.json`, with the chat templates."""
        names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
        config: dict[str, Any] = {
            f"{ours}_token": self._tokens[found]
            for theirs, ours in names.items()
            if (found := self._id(theirs)) is not None
        }
        default = self._metadata.get("tokenizer.chat_template")
        named = self._metadata.get("tokenizer.chat_templates")
        if isinstance(default, str):
            config["chat_template"] = default
        if isinstance(named, list) and named:
            templates = {"default": default} | {
                name: self._metadata.get(f"tokenizer.chat_template.{name}") for name in named
            }
            config["chat_template"] = [
                {"name": name, "template": text}
                for name, text in templates.items()
                if isinstance(text, str)
            ]
        return config

    def form(self) -> dict[str, Any]:
        """The content of `tokenizer.json`. Merges of 262,144 tokens take seconds to find.

        Raises:
            InvalidRequestError: a vocabulary that contradicts itself.
        """
        vocabulary = {token: index for index, token in enumerate(self._tokens)}
        if len(vocabulary) < len(self._tokens):
            twice = next(
                token for index, token in enumerate(self._tokens) if vocabulary[token] != index
            )
            raise self._refused(f"it has token {quoted(twice)} twice")
        merges = self._merges(vocabulary)
        parts = self._byte_level() if self._split else self._sentence_piece()
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
        }
        model |= parts.pop("model") | {"vocab": vocabulary, "merges": _written(merges)}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added(),
            **parts,
            "post_processor": self._post_processor(),
            "model": model,
        }

    def _added(self) -> list[dict[str, Any]]:
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        unknown = self._id("unknown")
        return [
            {"id": index, "content": token, **plain, "special": kind != _USER_DEFINED}
            for index in sorted({*self._special, *([] if unknown is None else [unknown])})
            if (token := self._tokens[index])
            and ((kind := self._types[index]) in (_CONTROL, _USER_DEFINED) or index == unknown)
            and index not in self._runs
        ]

    def _byte_level(self) -> dict[str, Any]:
        split = self._split or _GPT2
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": split.regex is None,
        }
        before: list[dict[str, Any]] = []
        if split.digits:
            before.append({"type": "Digits", "individual_digits": True})
        if split.regex is not None:
            before.append(
                {
                    "type": "Split",
                    "pattern": {"Regex": split.regex},
                    "behavior": "Isolated",
                    "invert": False,
                }
            )
        return {
            "normalizer": None if split.normaliser is None else {"type": split.normaliser},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*before, byte_level]},
            "decoder": byte_level | {"use_regex": True, "add_prefix_space": True},
            "model": {"ignore_merges": split.whole},
        }

    def _sentence_piece(self) -> dict[str, Any]:
        if self._get("remove_extra_whitespaces", bool, False):
            raise self._refused("it removes extra white space (remove_extra_whitespaces)")
        prefix = self._get("add_space_prefix", bool, True)
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        decoders: list[dict[str, Any]] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
        if prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = self._id("unknown")
        if unknown is None and _UNKNOWN in self._types:
            unknown = self._types.index(_UNKNOWN)
        return {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [*([{"type": "Prepend", "prepend": _SPACE}] * prefix), spaces],
            },
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "unk_token": None if unknown is None else self._tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": True,
            },
        }

    def _post_processor(self) -> dict[str, Any]:
        begins = self._split is None or self._split.begins
        ends = {"bos": begins, "eos": False}
        around = {
            name: token
            for name, default in ends.items()
            if self._get(f"add_{name}_token", bool, default)
            and (token := self._id(name)) is not None
        }
        texts = {name: self._tokens[token] for name, token in around.items()}

        def of(sequence: str, type_id: int) -> Iterator[dict[str, Any]]:
            if "bos" in texts:
                yield {"SpecialToken": {"id": texts["bos"], "type_id": type_id}}
            yield {"Sequence": {"id": sequence, "type_id": type_id}}
            if "eos" in texts:
                yield {"SpecialToken": {"id": texts["eos"], "type_id": type_id}}

        return {
            "type": "TemplateProcessing",
            "single": [*of("A", 0)],
            "pair": [*of("A", 0), *of("B", 1)],
            "special_tokens": {
                text: {"id": text, "ids": [around[name]], "tokens": [text]}
                for name, text in texts.items()
            },
        }

    def _merges(self, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
        if self._metadata.get(f"{_PREFIX}merges") is None:
            if self._split is not None:
                raise self._refused(f"it has no {_PREFIX}merges")
            return _merges_of(vocabulary, self._scores())
        found = []
        for merge in self._texts("merges"):
            left, _, right = merge.partition(" ")
            if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
                raise self._refused(f"its merge {quoted(merge)} is not of its tokens")
            found.append((left, right))
        return found

    def _scores(self) -> list[float]:
        scores: list[float] = self._get("scores", list, [])
        if len(scores) != len(self._tokens) or not all(type(score) is float for score in scores):
            raise self._refused(f"it has {len(self._tokens)} tokens and {len(scores)} scores")
        # What a user has defined is found before anything is merged.
        return [
            inf if kind == _USER_DEFINED else score
            for score, kind in zip(scores, self._types, strict=True)
        ]


def _written(merges: list[tuple[str, str]]) -> list[str] | list[tuple[str, str]]:
    """As texts of two words, which are read in two thirds of the time; as pairs where none can be.

    A text that begins with "#version" would be taken for a comment.
    """
    if any(" " in left or " " in right or left.startswith("#version") for left, right in merges):
        return merges
    return [f"{left} {right}" for left, right in merges]


def _merges_of(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return the merges of a vocabulary of SentencePiece: all pairs whose whole is a token.

    That with the better score comes first, then the longer left part, as in transformers'
    `generate_merges`.
    """
    found = [
        (-scores[index], index, -cut, token[:cut], token[cut:])
        for token, index in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    found.sort(key=itemgetter(0, 1, 2))
    return [(left, right) for *_, left, right in found]
