"""Random bits as functions of names, so that every layout has the same."""

from torch import Tensor


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


# The multipliers of splitmix64 (Steele, Lea, Flood 2014), as the int64 that torch computes in.
_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)


def _xor_shift_(x: Tensor, bits: int) -> Tensor:
    # torch shifts arithmetically; masking the sign bits makes the shift logical
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def hash64(x: Tensor, key: int | Tensor = 0) -> Tensor:
    """The splitmix64 finaliser of `x` xor `key`, elementwise on int64: a bijection."""
    x = _xor_shift_(x ^ key, 30).mul_(_MULTIPLY_1)
    x = _xor_shift_(x, 27).mul_(_MULTIPLY_2)
    return _xor_shift_(x, 31)


def random_bits(rows: Tensor, columns: Tensor, key: int | Tensor) -> Tensor:
    """64 random bits for each row and column, as int64."""
    mixed = hash64(rows, key) ^ hash64(columns)
    return _xor_shift_(mixed.mul_(_MULTIPLY_1), 32).mul_(_MULTIPLY_2)
