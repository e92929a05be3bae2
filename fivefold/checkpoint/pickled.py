"""Reads the pickles of torch.distributed.checkpoint (DCP) as data, without unpickling them.

Unpickling a file executes what the file asks for. Here a class is read as its name and an object as
a dict of its fields: nothing is imported and nothing is called, whatever the file contains.
"""

import pickletools
from typing import Any

import torch

from fivefold.errors import CheckpointError

DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

_DCP = "torch.distributed.checkpoint"
_CLASSES = {
    f"{_DCP}.metadata.{name}"
    for name in (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    )
} | {f"{_DCP}.filesystem._StorageInfo"}
_SHAPE = "torch.Size"
_WITHOUT_EFFECT = {  # strides in memory, and the path that the checkpoint was written to
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
}
_MEMBER = "builtins.getattr"  # Python before 3.11.4 pickles enumeration members by it
_NAMES = {*DTYPES, *_CLASSES, _SHAPE, _MEMBER, *_WITHOUT_EFFECT}


def read_pickle(pickled: bytes) -> Any:
    """The contents of DCP's metadata as dicts, lists, tuples, text, numbers and None.

    A `MetadataIndex` as the key of a dict becomes (name, offsets), and a dtype becomes its name,
    such as "torch.float32".

    Raises:
        CheckpointError: the bytes are damaged, or contain something that DCP does not write.
    """
    return _run(_PickleMachine(), pickled)


def read_foreign_pickle(pickled: bytes) -> Any:
    """The contents of another program's pickle, in the same way.

    An object of any class becomes a dict of its fields, and a call, which would have returned a
    tensor for example, a dict of its arguments. Bytes stored elsewhere become their address.

    Raises:
        CheckpointError: the bytes are damaged, or have opcodes that such pickles lack.
    """
    return _run(_ForeignMachine(), pickled)


def _run(machine: "_PickleMachine", pickled: bytes) -> Any:
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            machine.do(opcode.name, argument)
        return machine.stack.pop()
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise CheckpointError(f"is not what {_DCP} writes") from None


class _PickleMachine:
    """A pickle machine with the opcodes of plain data only."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._outer: list[list[Any]] = []  # the stack below each mark
        self._memo: dict[int, Any] = {}

    def do(self, opcode: str, argument: Any) -> None:
        stack = self.stack
        match opcode:
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "BININT1" | "BININT2" | "BININT" | "LONG1" | "SHORT_BINUNICODE" | "BINUNICODE":
                stack.append(argument)
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode[-1])
                if len(stack) < count:
                    raise IndexError
                stack[-count:] = [tuple(stack[-count:])]
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode == "NEWTRUE")
            case "EMPTY_TUPLE":
                stack.append(())
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "MARK":
                self._outer.append(stack)
                self.stack = []
            case "TUPLE" | "APPENDS" | "SETITEMS":
                self.stack = self._outer.pop()
                self._collect(opcode, stack)
            case "APPEND":
                self._collect("APPENDS", [stack.pop()])
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                self._collect("SETITEMS", [key, value])
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(self.named(module, name))
            case "NEWOBJ":
                arguments, name = stack.pop(), stack.pop()
                stack.append(self.made(name, arguments))
            case "BUILD":
                state = stack.pop()
                stack[-1].update(state if isinstance(state, dict) else {"state": state})
            case "REDUCE":
                arguments, name = stack.pop(), stack.pop()
                stack.append(self.called(name, arguments))
            case "PROTO" | "FRAME" | "STOP":
                pass
            case _:
                raise CheckpointError(f"has the pickle opcode {opcode}, which no checkpoint has")

    def _collect(self, opcode: str, items: list[Any]) -> None:
        """Collect items into a tuple, or add them to the list or dict on top of the stack."""
        if opcode == "TUPLE":
            self.stack.append(tuple(items))
        elif opcode == "APPENDS":
            self.stack[-1].extend(items)
        else:
            keys, values = items[::2], items[1::2]
            self.stack[-1].update(zip(map(self.key, keys), values, strict=True))

    def named(self, module: Any, name: Any) -> str:
        """A class or function, as its name."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError
        if f"{module}.{name}" not in _NAMES:
            raise CheckpointError(f"names {f'{module}.{name}'[:80]!r}, which no checkpoint does")
        return f"{module}.{name}"

    def made(self, name: Any, arguments: Any) -> dict[str, Any]:
        """A new object, whose fields follow."""
        if not _is_one_of(_CLASSES, name) or arguments != ():
            raise CheckpointError("makes an object that no checkpoint has")
        return {}

    def called(self, name: Any, arguments: Any) -> Any:
        """The result of calling a known name: a shape, for example, is its tuple of sizes."""
        owner = arguments[0] if name == _MEMBER and arguments else name
        if _is_one_of(_WITHOUT_EFFECT, owner):
            return None
        if name != _SHAPE:
            raise CheckpointError("calls what no checkpoint calls")
        (shape,) = arguments
        return shape

    def key(self, key: Any) -> Any:
        """A key of a dict: text, or a MetadataIndex as its name and offsets."""
        if isinstance(key, str):
            return key
        name, offset = key["fqn"], key["offset"]
        if not isinstance(name, str) or not all(type(number) is int for number in offset):
            raise TypeError
        return name, tuple(offset)


class _ForeignMachine(_PickleMachine):
    """A machine that knows no classes, and the opcodes of older protocols."""

    def do(self, opcode: str, argument: Any) -> None:
        stack = self.stack
        match opcode:
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "GLOBAL":
                stack.append(argument.replace(" ", "."))
            case "BINFLOAT" | "LONG4" | "BINUNICODE8" | "SHORT_BINSTRING" | "BINSTRING":
                stack.append(argument)
            case "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8" | "BYTEARRAY8":
                stack.append(argument)
            case "BINPERSID":
                pass  # the address is on the stack
            case "EMPTY_SET":
                stack.append([])
            case "ADDITEMS" | "FROZENSET":
                self.stack = self._outer.pop()
                self._collect("APPENDS" if opcode == "ADDITEMS" else "TUPLE", stack)
            case "BUILD":
                state, fields = stack.pop(), stack[-1]
                if isinstance(fields, dict):
                    fields.update(state if isinstance(state, dict) else {"state": state})
            case _:
                super().do(opcode, argument)

    def named(self, module: Any, name: Any) -> str:
        return f"{module}.{name}"

    def made(self, name: Any, arguments: Any) -> dict[str, Any]:
        return {}

    def called(self, name: Any, arguments: Any) -> Any:
        return arguments[0] if name == _SHAPE else {"of": name, "given": arguments}

    def key(self, key: Any) -> Any:
        """The same; a number becomes its text, and anything else the name of its type."""
        if isinstance(key, str) or (isinstance(key, dict) and key.get("offset") is not None):
            return super().key(key)
        return str(key) if isinstance(key, int | float) else type(key).__name__


def _is_one_of(names: set[str], name: Any) -> bool:
    return isinstance(name, str) and name in names
