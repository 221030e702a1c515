"""Modules in the place of packages that SGLang imports on every machine and never uses to serve text on a CPU."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Named(type):
    """A class that takes any arguments and has every attribute: its name."""

    def __call__(cls, *arguments: object, **options: object) -> object:
        return super().__call__()

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Absent(ModuleType):
    """A module that has every name: classes for the capitalised ones, further modules for the others."""

    __version__ = "0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__name__ in FINDER.empty:
            raise AttributeError(name)
        return Named(name, (), {}) if name[0].isupper() else import_module(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **options: object) -> Any:
        """A decorator that changes nothing. Kernels are defined so when a module is imported; none is ever run."""
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self


class Finder(MetaPathFinder, Loader):
    """Finds every module of the packages that are stood in for."""

    def __init__(self) -> None:
        self.packages: set[str] = set()
        self.empty: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The import system's question."""
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module, which needs no code of its own."""
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to be done."""


FINDER = Finder()
sys.meta_path.append(FINDER)


def stand_in(package: str, *, empty: Sequence[str] = ()) -> None:
    """Put an :class:`Absent` in the place of the package that is just being imported.

    Args:
        package: its name.
        empty: modules of it in which nothing is found, for code that asks what there is.
    """
    FINDER.packages.add(package)
    FINDER.empty.update(empty)
    module = Absent(package)
    module.__spec__ = sys.modules[package].__spec__
    sys.modules[package] = module
