"""The flag of a Sequence that ends its forwards."""

from __future__ import annotations

import ctypes


class NativeCancel:
    """Ends the forward in flight, and refuses later forwards until it is lowered.

    For any thread, and without a lock: a destructor may raise it during garbage collection, and a signal handler at
    any instruction.
    """

    def __init__(self) -> None:
        self._flag = ctypes.c_int32(0)  # read by the threads of a forward

    @property
    def address(self) -> int:
        return ctypes.addressof(self._flag)

    @property
    def raised(self) -> bool:
        return bool(self._flag.value)

    def set(self, raised: bool) -> None:
        self._flag.value = raised
