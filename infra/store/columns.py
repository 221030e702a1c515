"""Rows of Parquet files as Arrow columns: few bytes a row, and Python objects only of the row that is asked for."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Value = TypeVar("Value")


class Columns:
    """The rows of a table.

    Args:
        table: its lists hold numbers, and none of them is null.
    """

    def __init__(self, table: Any) -> None:
        self._arrays = {name: table[name].combine_chunks() for name in table.column_names}
        self._reads = {name: _reader(array) for name, array in self._arrays.items()}
        self._rows = int(table.num_rows)

    def __len__(self) -> int:
        return self._rows

    def row(self, number: int) -> dict[str, Any]:
        """All values of a row by column; lists are lists of int."""
        return {name: read(number) for name, read in self._reads.items()}

    def value(self, name: str, number: int) -> Any:
        """One value of a row."""
        return self._reads[name](number)

    def column(self, name: str) -> list[Any]:
        """A column's values."""
        values: list[Any] = self._arrays[name].to_pylist()
        return values

    def numbers(self, name: str) -> NDArray[Any]:
        """A column of numbers, or all numbers of a column of lists one after the other."""
        array = self._arrays[name]
        found: NDArray[Any] = (array.flatten() if pa.types.is_list(array.type) else array).to_numpy()
        return found

    def lengths(self, name: str) -> NDArray[np.int64]:
        """How many numbers each list of a column has, int64 [rows]."""
        return np.diff(self._arrays[name].offsets.to_numpy()).astype(np.int64)


def _reader(array: Any) -> Callable[[int], Any]:
    if not pa.types.is_list(array.type):
        return lambda number: array[number].as_py()
    ends, numbers = array.offsets.to_numpy(), array.values.to_numpy()
    return lambda number: numbers[ends[number] : ends[number + 1]].tolist()


class Lazy(Sequence[Value], Generic[Value]):
    """A sequence whose values are made when they are asked for, and not kept.

    Args:
        count: how many there are.
        make: makes the value at a place.
    """

    def __init__(self, count: int, make: Callable[[int], Value]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> Value: ...

    @overload
    def __getitem__(self, place: slice) -> "Lazy[Value]": ...

    def __getitem__(self, place: int | slice) -> "Value | Lazy[Value]":
        places = range(self._count)[place]
        if isinstance(places, range):
            return Lazy(len(places), lambda number: self._make(places[number]))
        return self._make(places)

    def __iter__(self) -> Iterator[Value]:
        return map(self._make, range(self._count))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]
