"""What numba's Python has no words for: pointers, and calls of C functions at an address."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def call(_typing: Any, address: Any, tensor: Any, ask: Any) -> Any:
    """Calls the C function `int8 (void *tensor, int8 ask)` at an address known at run time."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        byte, pointer = ir.IntType(8), ir.IntType(8).as_pointer()
        function = ir.FunctionType(byte, [pointer, byte])
        target = builder.inttoptr(arguments[0], function.as_pointer())
        return builder.call(target, [arguments[1], arguments[2]])

    return types.int8(types.int64, types.voidptr, types.int8), generate


@intrinsic
def call_is_host(_typing: Any, address: Any, buffer: Any) -> Any:
    """Calls the C function `bool (void *buffer)` at an address known at run time."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        bit, pointer = ir.IntType(1), ir.IntType(8).as_pointer()
        target = builder.inttoptr(arguments[0], ir.FunctionType(bit, [pointer]).as_pointer())
        return builder.call(target, [builder.inttoptr(arguments[1], pointer)])

    return types.boolean(types.int64, types.int64), generate


@intrinsic
def pointer(_typing: Any, address: Any) -> Any:
    """An address as a pointer that `carray` takes."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def address_of(_typing: Any, pointer: Any) -> Any:
    """A pointer as a number."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return types.int64(types.voidptr), generate
