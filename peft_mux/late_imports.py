"""Imports a module of ours as soon as another one was imported, so that `import peft_mux` itself stays light.

PEFT has to know our methods before it reads a file of theirs, yet importing PEFT takes seconds. So whoever imports
PEFT, before us or after us, finds our methods there, and nobody waits for what he does not use.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(first: str, then: str) -> None:
    """Import a module right after another one: now, where that one is there already, else when it is imported.

    Args:
        first: name of the module that is waited for.
        then: name of the module that follows it.
    """
    if sys.modules.get(first) is not None:  # `None` stands for a module that was declared absent
        importlib.import_module(then)
    else:
        sys.meta_path.insert(0, _Watcher(first, then))


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds one module as ever, and lets another one follow it."""

    def __init__(self, first: str, then: str) -> None:
        self._first, self._then = first, then

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return how the module that is waited for is loaded; `None` for any other, and where there is none."""
        # A copy, as other threads import and ask, too, and take watchers out.
        finders = list(sys.meta_path)
        if fullname != self._first or self not in finders:
            return None
        for finder in finders[finders.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._watch(spec.loader)
                return spec
        return None

    def _watch(self, loader: Any) -> None:
        execute = loader.exec_module

        def execute_and_follow(module: ModuleType) -> None:
            # As the loader was: it is kept by the module, and used again where that is reloaded. Of several watchers
            # of one module the outermost has done so already.
            vars(loader).pop("exec_module", None)
            execute(module)
            # Only now, so that a module that fails is waited for again.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            importlib.import_module(self._then)

        loader.exec_module = execute_and_follow
