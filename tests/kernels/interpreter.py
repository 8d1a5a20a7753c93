"""What scripts that run kernels in Triton's interpreter share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def keep_patches() -> None:
    """Let Triton's language stay as its interpreter needs it, once patched: Triton does it again for every launch.

    A fifth of the time of small launches goes there. For processes that interpret whatever they launch.
    """
    from triton.runtime import interpreter

    patched: set[int] = set()
    patch: Callable[[Any], Any] = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        # Which parts are patched is read off what the kernel's module has imported.
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
