"""Quantisation of a checkpoint's weights by its `config.json`; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from inlay.base.errors import InvalidRequestError

Block: TypeAlias = tuple[int, int]
"""Rows and columns that share a scale."""

Method: TypeAlias = Literal["fp8", "compressed-tensors", "awq", "gptq"]
"""Name of a family of formats, as `quant_method` says."""

_SERVED = (
    "the torch engine serves e4m3 fp8 scaled in blocks, compressed-tensors (pack-quantized, "
    "int-quantized, float-quantized, naive-quantized) and gptq of 4 and 8 bits, and awq (gemm) of "
    "4 bits"
)

_FORMATS = frozenset({"pack-quantized", "int-quantized", "float-quantized", "naive-quantized"})

_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class Scheme:
    """Storage of a checkpoint's quantised weights.

    Attributes:
        method: how tensors are named and laid out.
        bits: of a code, of AWQ and GPTQ; in compressed-tensors it follows from the shapes.
        group: inputs that share a scale, of AWQ and GPTQ; -1 for all.
        block: rows and columns that share a scale, of fp8; (0, 0) if none do.
        zeros_less_one: True if zeros are stored less 1, as GPTQ's first format does.
    """

    method: Method
    bits: int = 8
    group: int = -1
    block: Block = (0, 0)
    zeros_less_one: bool = False


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a model's `config.json`; None if its weights are not quantised.

    Raises:
        InvalidRequestError: another kind of quantisation; the message names it.
    """
    quantised = config.get("quantization_config") or config.get("compression_config")
    if not quantised:
        return None
    if not isinstance(quantised, dict):
        raise InvalidRequestError(
            f"config.json: quantization_config is {quantised!r}, not an object"
        )
    match quantised.get("quant_method", "unknown"):
        case "fp8":
            return _fp8(quantised)
        case "compressed-tensors":
            return _compressed_tensors(quantised)
        case "awq":
            return _awq(quantised)
        case "gptq":
            return _gptq(quantised)
        case other:
            raise _refused(str(other))


def _fp8(quantised: dict[str, Any]) -> Scheme:
    block = _block(quantised.get("weight_block_size"), "fp8, weight_block_size")
    if quantised.get("fmt", "e4m3") != "e4m3":
        raise _refused(f"fp8, fmt {quantised['fmt']}")
    return Scheme("fp8", block=block)


def _block(found: object, said: str) -> Block:
    if (
        not isinstance(found, list)
        or len(found) != 2
        or not all(type(n) is int and n > 0 for n in found)
    ):
        raise _refused(f"{said} {found}")
    return found[0], found[1]


def _compressed_tensors(quantised: dict[str, Any]) -> Scheme:
    groups = quantised.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise _refused(f"compressed-tensors, config_groups {groups!r}")
    whole = quantised.get("format")
    block = (0, 0)
    for group in groups.values():
        stored = group.get("format") or whole
        if stored not in _FORMATS:
            raise _refused(f"compressed-tensors, format {stored}")
        weights = group.get("weights")
        if weights is None:
            continue
        bits, kind = weights.get("num_bits"), weights.get("type", "int")
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise _refused(f"compressed-tensors, {kind} of {bits} bits")
        if weights.get("strategy") == "block":
            block = _block(weights.get("block_structure"), "compressed-tensors, block_structure")
    sparsity = quantised.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _refused(f"compressed-tensors, sparsity {sparsity['format']}")
    return Scheme("compressed-tensors", block=block)


def _awq(quantised: dict[str, Any]) -> Scheme:
    bits = quantised.get("bits", quantised.get("w_bit"))
    version = str(quantised.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise _refused(f"awq, {bits} bits, version {version}")
    return Scheme("awq", 4, _group(quantised, quantised.get("q_group_size", -1)))


def _gptq(quantised: dict[str, Any]) -> Scheme:
    bits = quantised.get("bits")
    stored = quantised.get("checkpoint_format") or "gptq"
    if bits not in _BITS or stored not in ("gptq", "gptq_v2"):
        raise _refused(f"gptq, {bits} bits, checkpoint_format {stored}")
    return Scheme("gptq", bits, _group(quantised, -1), zeros_less_one=stored == "gptq")


def _group(quantised: dict[str, Any], default: object) -> int:
    group = quantised.get("group_size", default)
    if type(group) is not int or (group < 1 and group != -1):
        raise _refused(f"{quantised['quant_method']}, group_size {group!r}")
    return group


def _refused(said: str) -> InvalidRequestError:
    return InvalidRequestError(f"the checkpoint is quantised ({said}); {_SERVED}")
