"""Vectors of an answer with `encoding_format` "safetensors", as a client reads them."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from inlay.base.errors import InvalidRequestError
from inlay.tensors.named import read_arrays


class SparseWeights(NamedTuple):
    """A sparse vector: ids of the vocabulary, ascending, and the weight of each."""

    indices: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Vectors:
    """The outputs of all inputs.

    Attributes:
        arrays: of the file, by name.
        metadata: model, `weights_id`, role, usage.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    metadata: Mapping[str, str]

    @property
    def dense(self) -> npt.NDArray[Any]:
        """[inputs, size]; of int8 as float32, by its factors."""
        return self._array("dense")

    @property
    def tokens(self) -> list[npt.NDArray[Any]]:
        """[positions, size] of each input, likewise."""
        return self._split("tokens", self._array("tokens"))

    @property
    def token_labels(self) -> list[npt.NDArray[Any]]:
        """[positions, labels] of each input, likewise."""
        return self._split("token_labels", self._array("token_labels"))

    @property
    def sparse(self) -> list[SparseWeights]:
        """The sparse vector of each input."""
        parts = (
            self._split("sparse", self._array(f"sparse.{part}")) for part in SparseWeights._fields
        )
        return [SparseWeights(*each) for each in zip(*parts, strict=True)]

    def _array(self, name: str) -> npt.NDArray[Any]:
        if name not in self.arrays:
            raise InvalidRequestError(
                f"the answer has no {name}; it has {', '.join(sorted(self.arrays))}"
            )
        array, scale = self.arrays[name], self.arrays.get(f"{name}.scale")
        return array if scale is None else array.astype(np.float32) / scale[..., None]

    def _split(self, name: str, array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        bounds = self._array(f"{name}.offsets").tolist()
        return [array[start:stop] for start, stop in pairwise(bounds)]


def read_vectors(data: bytes) -> Vectors:
    """Return the vectors in the body of an answer. Raises `EngineError` if it is no such file."""
    return Vectors(*read_arrays(data))
