"""Encoding of vectors: numbers in JSON, base64 in JSON, or raw bytes, as in vLLM."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from inlay.api.openai.embeddings.gathering import Array
from inlay.api.openai.schema.embeddings import EncodedRequest, TextsUsage
from inlay.base.errors import InvalidRequestError
from inlay.http.server import JSON_HEADER

Format: TypeAlias = Literal["float", "base64", "bytes", "bytes_only", "safetensors"]
Header: TypeAlias = tuple[bytes, bytes]

DTYPES: Mapping[str, npt.DTypeLike] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
"""Dtypes by their `embed_dtype` name."""

INTEGERS: Mapping[str, npt.DTypeLike] = {"int8": np.int8, "binary": np.int8, "ubinary": np.uint8}
"""Dtypes of quantised vectors, by the names of sentence-transformers and Cohere."""

_OCTETS = (b"content-type", b"application/octet-stream")

_FLOAT_BYTES = 14
"""Approximate bytes of an element as a number in JSON."""

_MAX_DESCRIBED = 400
"""Maximum inputs that a header can describe: clients read lines of 64 KiB."""

_encode = msgspec.json.Encoder().encode


class EmbeddingAnswer(NamedTuple):
    """A response: its body, its media type, and further headers."""

    body: bytes
    media: Header
    headers: tuple[Header, ...] = ()


@dataclass(frozen=True, slots=True)
class About:
    """Metadata of a response beside its vectors.

    Attributes:
        id: id of the response.
        created: Unix time.
        model: name of the model.
        usage: usage of all inputs.
        kind: `object` of each item; its vector is in `embedding`, or in `data` for "pooling".
    """

    id: str
    created: int
    model: str
    usage: TextsUsage
    kind: Literal["embedding", "pooling"] = "embedding"

    @property
    def key(self) -> str:
        """Name of an item's vector."""
        return "data" if self.kind == "pooling" else "embedding"


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encoding of vectors in a response.

    Attributes:
        format: "float" and "base64" are in JSON, "bytes" and "bytes_only" are the raw body,
            "safetensors" is a file with all outputs (`inlay.api.openai.embeddings.file_answer`).
        dtype: one of `DTYPES`, of base64 and bytes, or of `INTEGERS`.
        endianness: byte order of base64 and bytes.
    """

    format: Format = "float"
    dtype: str = "float32"
    endianness: Literal["native", "big", "little"] = "native"

    @classmethod
    def of(cls, request: EncodedRequest) -> "Encoding":
        """Return the encoding of a request.

        Raises:
            InvalidRequestError: a dtype or byte order with numbers, which have none, or a byte
                order with a file, which has its own.
        """
        found = cls(
            request.encoding_format or "float",
            request.embed_dtype or "float32",
            request.endianness or "native",
        )
        if found.format == "safetensors" and found.endianness == "big":
            raise InvalidRequestError(
                "endianness big is of base64 and bytes; safetensors is little endian",
                param="endianness",
            )
        if found.format == "float":
            for name, value, default in (
                ("embed_dtype", found.dtype, "float32"),
                ("endianness", found.endianness, "native"),
            ):
                if value != default and value not in INTEGERS:
                    raise InvalidRequestError(
                        f"{name} {value} is of binary encodings; encoding_format is float, "
                        "allowed with it: base64, bytes, bytes_only",
                        param=name,
                    )
        return found

    def check_count(self, count: int) -> None:
        """Raise `InvalidRequestError` if the header cannot describe `count` vectors."""
        if self.format == "bytes" and count > _MAX_DESCRIBED:
            raise InvalidRequestError(
                f"encoding_format bytes describes each of {count} inputs in a header; at most "
                f"{_MAX_DESCRIBED} fit, bytes_only takes more",
                param="encoding_format",
            )

    @property
    def element_bytes(self) -> int:
        """Approximate bytes of an element in a response."""
        size = np.dtype({**DTYPES, **INTEGERS}[self.dtype]).itemsize
        return {"float": _FLOAT_BYTES, "base64": 2 * size}.get(self.format, size)

    def check_vectors(self, names: Sequence[str]) -> None:
        """Raise `InvalidRequestError` for a quantised dtype of outputs that are no vectors."""
        others = [name for name in names if name not in ("dense", "tokens")]
        if self.dtype in INTEGERS and others:
            raise InvalidRequestError(
                f"embed_dtype {self.dtype} is of dense and tokens; the request gets "
                f"{' and '.join(others)}, allowed: {', '.join(DTYPES)}",
                param="embed_dtype",
            )

    def check_json(self) -> None:
        """Raise `InvalidRequestError` unless outputs of several kinds fit into the format."""
        if self.format not in ("float", "base64"):
            raise InvalidRequestError(
                f"encoding_format {self.format} has one dense vector for each input and nothing "
                "else; allowed for other outputs: float, base64, and of /v1/embeddings safetensors",
                param="encoding_format",
            )

    def vectors(self, key: str, values: Array) -> dict[str, Any]:
        """Return vectors [size] or [positions, size] under `key`, as an answer has them.

        With them stands their `shape`, where they are several, and of int8 their `scale`. Raises as
        `answer`.
        """
        found: npt.NDArray[Any] = values
        more: dict[str, Any] = {}
        if self.dtype in INTEGERS:
            found, scale = quantised(values, self.dtype)
            more = {} if scale is None else {"scale": scale.tolist()}
        shape = {"shape": list(found.shape)} if found.ndim > 1 else {}
        return {**shape, key: self.shown(found), **more}

    def shown(self, values: "npt.NDArray[Any]") -> msgspec.Raw | str:
        """Return an array of any shape as numbers in JSON, or as base64 of its bytes.

        Integers keep their dtype. Raises as `answer`.
        """
        if self.format == "float":
            return msgspec.Raw(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY))
        return pybase64.b64encode_as_string(self._binary(values[None]).data)

    def answer(
        self, vectors: Array, about: About, items: Sequence[Mapping[str, Any]]
    ) -> EmbeddingAnswer:
        """Return the response with `vectors`, float32 [inputs, size]. CPU work.

        `items` has, of each input, what its item in JSON has beside the vector.

        Raises:
            InvalidRequestError: a value does not fit into the dtype.
        """
        values: npt.NDArray[Any] = vectors
        scales: list[Mapping[str, Any]] = [{}] * len(vectors)
        if self.dtype in INTEGERS:
            values, found = quantised(vectors, self.dtype)
            if found is not None:
                scales = [{"scale": each} for each in found.tolist()]
        if self.format in ("float", "base64"):
            if self.format == "float":
                shown: list[Any] = [self.shown(row) for row in values]
            else:
                shown = [pybase64.b64encode_as_string(row.data) for row in self._binary(values)]
            both = zip(shown, scales, strict=True)
            return json_answer([{about.key: one, **scale} for one, scale in both], about, items)
        rows = self._binary(values)
        body = rows.tobytes()
        if self.format == "bytes_only":
            return EmbeddingAnswer(body, _OCTETS)
        size = len(body) // len(vectors)
        data = [
            {
                "index": index,
                "embed_dtype": self.dtype,
                "endianness": self.endianness,
                "start": index * size,
                "end": (index + 1) * size,
                "shape": [values.shape[1]],
                **scales[index],
            }
            for index in range(len(vectors))
        ]
        usage = {
            "prompt_tokens": about.usage.prompt_tokens,
            "total_tokens": about.usage.total_tokens,
        }
        metadata = {
            "id": about.id,
            "created": about.created,
            "model": about.model,
            "data": data,
            "usage": usage,
        }
        # A header holds ASCII only; json escapes the rest.
        return EmbeddingAnswer(
            body, _OCTETS, ((b"metadata", json.dumps(metadata).encode("ascii")),)
        )

    def cast(self, vectors: Array) -> tuple["npt.NDArray[Any]", "npt.NDArray[np.float32] | None"]:
        """Return vectors [..., size] in the dtype, and the factors of int8. Raises as `answer`."""
        if self.dtype in INTEGERS:
            return quantised(vectors, self.dtype)
        return self._floats(vectors), None

    def _binary(self, vectors: "npt.NDArray[Any]") -> npt.NDArray[np.uint8]:
        """Return the bytes of each vector, in the last dimension."""
        values = self._floats(vectors)
        if self.endianness not in ("native", sys.byteorder):
            values = values.view(f"u{values.dtype.itemsize}").byteswap()
        return np.ascontiguousarray(values).view(np.uint8)

    def _floats(self, vectors: "npt.NDArray[Any]") -> "npt.NDArray[Any]":
        """Return floats in the dtype, and integers as they are."""
        # Values that do not fit become infinite or NaN, which is checked below.
        with np.errstate(over="ignore", invalid="ignore"):
            kind = DTYPES[self.dtype] if vectors.dtype.kind == "f" else vectors.dtype
            values: npt.NDArray[Any] = vectors.astype(kind)
        if (
            vectors.dtype.kind == "f"
            and self.dtype != "float32"
            and not np.isfinite(values.astype(np.float32)).all()
        ):
            raise InvalidRequestError(
                f"embed_dtype {self.dtype} does not hold a value of {np.abs(vectors).max():g}",
                param="embed_dtype",
            )
        return values


def quantised(
    vectors: Array, dtype: str
) -> tuple["npt.NDArray[Any]", "npt.NDArray[np.float32] | None"]:
    """Return vectors [..., size] as integers, and of int8 the factors [...] they were made with.

    `binary` and `ubinary` are as sentence-transformers makes them: a bit for each element, 1 above
    0, the first in the highest bit. Its int8 needs ranges of each dimension that were calibrated on
    many vectors; here each vector has a factor of its own, with which its largest element is 127.
    That needs nothing kept, and is nearer: of all-MiniLM-L6-v2, cosines of codes find 0.996 of the
    10 nearest of 493 texts, with ranges of 1,000 others 0.866 (0.994 as restored numbers, off by up
    to 0.016 for 0.002), as 58% of the vectors have an element outside of them.
    """
    if dtype == "int8":
        largest = np.abs(vectors).max(axis=-1, keepdims=True)
        scale = (127 / np.where(largest == 0, 1, largest)).astype(np.float32)
        return np.rint(vectors * scale).clip(-127, 127).astype(np.int8), scale[..., 0]
    bits = np.packbits(vectors > 0, axis=-1)
    return (bits if dtype == "ubinary" else (bits - np.uint8(128)).view(np.int8)), None


def json_answer(
    shown: Sequence[Mapping[str, Any]], about: About, items: Sequence[Mapping[str, Any]]
) -> EmbeddingAnswer:
    """Return the response of inputs, of which each has what is `shown` and in `items`. CPU work."""
    data = [
        {"index": index, "object": about.kind, **one, **more}
        for index, (one, more) in enumerate(zip(shown, items, strict=True))
    ]
    response = {
        "id": about.id,
        "object": "list",
        "created": about.created,
        "model": about.model,
        "data": data,
        "usage": about.usage,
    }
    return EmbeddingAnswer(_encode(response), JSON_HEADER)
