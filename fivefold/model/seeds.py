"""Random seeds derived from names, so that no random number depends on the layout."""

from hashlib import blake2b


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed, a pure function of `parts`, the same on every machine.

    >>> derive_seed(1234, "norm.weight", 0) == derive_seed(1234, "norm.weight", 0)
    True
    """
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
