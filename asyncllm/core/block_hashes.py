"""Block hashes: names of full token blocks, each computed from all tokens up to the block's end."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Protocol

_DIGEST_SIZE = 16
_BLOCK_HASH_PERSON = b"asyncllm-kv"
_ROOT_HASH = hashlib.blake2b(digest_size=_DIGEST_SIZE, person=_BLOCK_HASH_PERSON).digest()


def root_hash(cache_salt: str | None) -> bytes:
    """Parent hash of a sequence's first block. All that the KV depends on besides the tokens must
    be hashed here; the chain of hashes carries it to every later block."""
    if cache_salt is None:
        return _ROOT_HASH
    # BLAKE2's ``person`` differs from that of block hashes, so no salt's hash equals a block's.
    salt = b"salt\0" + cache_salt.encode()
    return hashlib.blake2b(salt, digest_size=_DIGEST_SIZE, person=_BLOCK_HASH_PERSON).digest()


def append_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, cache_salt: str | None
) -> None:
    """Append the hashes of the full blocks that ``hashes`` lacks. A hash is 128-bit BLAKE2b of the
    parent's hash and the token ids, equal in every process."""
    num_full = len(token_ids) // block_size
    if len(hashes) >= num_full:
        return
    parent = hashes[-1] if hashes else root_hash(cache_salt)
    tokens = array("I", token_ids[len(hashes) * block_size : num_full * block_size])
    data, size = tokens.tobytes(), block_size * tokens.itemsize
    for i in range(0, len(data), size):
        parent = _hash_block(parent, data[i : i + size])
        hashes.append(parent)


def partial_block_hash(
    hashes: list[bytes], token_ids: Sequence[int], cache_salt: str | None
) -> bytes:
    """Hash of a block that is not full, from those of the full blocks before it. It equals no full
    block's hash.

    Args:
        token_ids: the tokens of the partial block.
    """
    parent = hashes[-1] if hashes else root_hash(cache_salt)
    return _hash_block(parent, array("I", token_ids).tobytes())


def _hash_block(parent: bytes, tokens: bytes) -> bytes:
    return hashlib.blake2b(parent + tokens, digest_size=_DIGEST_SIZE).digest()


class HashedTokens(Protocol):
    """Protocol of a prompt that can be looked up in the prefix cache: Request or PromptHashes."""

    @property
    def max_cached_tokens(self) -> int: ...

    def extend_hashes(self, block_size: int) -> list[bytes]: ...


class PromptHashes:
    """Block hashes of a prompt before its submission, by block size.

    Args:
        token_ids: the prompt.
        cache_salt: prompts share cached prefixes only if their salts are equal.
    """

    def __init__(self, token_ids: Sequence[int], cache_salt: str | None = None) -> None:
        self._token_ids = token_ids
        self._cache_salt = cache_salt
        self._block_hashes: dict[int, list[bytes]] = {}

    @property
    def max_cached_tokens(self) -> int:
        """Maximum number of leading tokens that a request with this prompt takes from the prefix
        cache: all but the last token, whose logits are sampled."""
        return max(len(self._token_ids) - 1, 0)

    def extend_hashes(self, block_size: int) -> list[bytes]:
        """Hashes of all full blocks; each is computed once."""
        hashes = self._block_hashes.setdefault(block_size, [])
        append_block_hashes(hashes, self._token_ids, block_size, self._cache_salt)
        return hashes
