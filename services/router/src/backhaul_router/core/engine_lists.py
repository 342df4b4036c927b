"""What engines answer beside turns: the token ids of a prompt, and their models."""

from typing import Any

import msgspec


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


_decode_tokens = msgspec.json.Decoder(_Tokens).decode
_decode_models = msgspec.json.Decoder(_Models).decode


def tokens_in(body: bytes) -> list[int]:
    """Returns the token ids of a prompt; none when they cannot be read."""
    try:
        return _decode_tokens(body).tokens
    except (ValueError, RecursionError):
        return []


def models_in(body: bytes) -> list[dict[str, Any]]:
    """Returns the entries of a model list. Raises ValueError for anything else."""
    try:
        return _decode_models(body).data
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
