"""Triton's interpreter without the work it does again and again: twice as fast, with the same results.

Only for a process with TRITON_INTERPRET=1. What is left out is told at each place.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any


def speed_up() -> None:
    from triton import language
    from triton.runtime import interpreter

    # Every sum and product of integers is also computed in 64 bits, to assert that it fits; but without
    # `options.debug` the assertion is left out.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    # A dictionary of all types is made for each operation.
    of_scalar = functools.cache(interpreter._get_np_dtype)

    def numpy_type(of: Any) -> Any:
        element = of.element_ty if isinstance(of, language.block_type) else of
        of_pointer = isinstance(element, language.pointer_type)  # has no hash
        return uint64 if of_pointer else of_scalar(element)

    uint64 = of_scalar(language.uint64)
    interpreter._get_np_dtype = numpy_type

    # A kernel that calls another function makes the interpreter look through the whole language at every call. It is
    # set up for the kernel already; for functions of Triton's own library once a launch is enough.
    call, launch = interpreter.InterpretedFunction.__call__, interpreter.GridExecutor.__call__
    set_up: set[str] = set()

    def call_once_set_up(self: Any, *arguments: Any, **options: Any) -> Any:
        module = self.fn.__module__
        if module in set_up or module.startswith("flash_inside"):
            return self.rewrite()(*arguments, **options)
        set_up.add(module)
        return call(self, *arguments, **options)

    def launch_anew(self: Any, *arguments: Any, **options: Any) -> None:
        set_up.clear()
        launch(self, *arguments, **options)

    interpreter.InterpretedFunction.__call__ = call_once_set_up
    interpreter.GridExecutor.__call__ = launch_anew
