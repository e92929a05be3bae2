"""Random changes to small files: of bytes, of JSON values, of the state of pickled objects."""

import json
import pickle
from random import Random
from typing import Any

from torch.distributed.checkpoint.metadata import TensorProperties

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 9999, 2**31, 2**63, 10**30, 0.5, 1e300, -0.0),
    *("", "x", "6", "../x", "/etc/passwd", "\0", "é" * 300, "__1_0.distcp", ".metadata"),
    *([], [None], [[[]]], {}, {"step": 6}, {"": {}}, ["a", 1]),
]


def mutated_bytes(data: bytes, chance: Random) -> bytes:
    """One to three changes of bits, bytes and lengths."""
    held = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(held) + 1)
        length = chance.choice((1, 1, 2, 4, 8, 50))
        match chance.randrange(7):
            case 0 if held:
                held[at % len(held)] ^= 1 << chance.randrange(8)
            case 1 if held:
                held[at % len(held)] = chance.randrange(256)
            case 2:
                held[at : at + length] = chance.randbytes(length)
            case 3:
                del held[at : at + length]
            case 4:
                held[at:at] = chance.randbytes(length)
            case 5:
                other = chance.randrange(len(held) + 1)
                held[at : at + length] = held[other : other + length]
            case 6:
                del held[at:]
    return bytes(held)


def mutated_json(data: bytes, chance: Random) -> bytes:
    """One value, or the name of one, replaced or removed."""
    held = json.loads(data)
    container, key = chance.choice(list(_places(held)))
    if container is None:
        held = chance.choice(ODD)
    elif chance.random() < 0.2:
        del container[key]
    elif isinstance(container, dict) and chance.random() < 0.2:
        container[str(chance.choice(ODD))] = container.pop(key)
    elif isinstance(container[key], int) and chance.random() < 0.3:
        container[key] += chance.choice((-1, 1, 100))
    else:
        container[key] = chance.choice(ODD)
    return json.dumps(held, indent=1).encode()


def mutated_pickle(data: bytes, chance: Random) -> bytes:
    """One value within pickled objects, replaced, removed or swapped with another."""
    held = pickle.loads(data)
    container, key = chance.choice([place for place in _places(held) if place[0] is not None])
    if chance.random() < 0.15:
        del container[key]
    elif chance.random() < 0.3:
        other, name = chance.choice([place for place in _places(held) if place[0] is not None])
        container[key] = other[name]
    elif isinstance(container[key], int) and chance.random() < 0.5:
        container[key] += chance.choice((-1, 1, 1000))
    else:
        container[key] = chance.choice(ODD)
    return pickle.dumps(held)


def _places(value: Any) -> Any:
    """Every (container, key) below a value; (None, None) for the value itself."""
    yield None, None
    waiting = [value]
    while waiting:
        held = waiting.pop()
        if hasattr(held, "__dict__") and not isinstance(held, TensorProperties):
            held = vars(held)
        keys: Any = ()
        if isinstance(held, dict):
            keys = list(held)
        elif isinstance(held, list):
            keys = range(len(held))
        for key in keys:
            yield held, key
            waiting.append(held[key])
            if hasattr(key, "__dict__"):
                waiting.append(key)
