"""Functions as machine code, which numba compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

from routeahead.errors import SettingsError


def machine_code(signature: Any, function: Callable[..., Any]) -> Any:
    """`function` as a numba cfunc.

    numba keeps the code on disk, as a start takes half a second less with it. What it notices is a
    change of the function's file and of the values that the function closes over, no other.

    Raises:
        SettingsError: numba was told not to compile.
    """
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        raise SettingsError("NUMBA_DISABLE_JIT is set, but streaming needs numba: unset it")
    try:
        return numba.cfunc(signature, cache=True, error_model="numpy")(function)
    except Exception:  # no folder that can be written, a full disk, a damaged file
        return numba.cfunc(signature, cache=False, error_model="numpy")(function)
