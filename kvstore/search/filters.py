"""Attribute filters of OpenAI's vector stores, as masks over files.

    {"type": "eq" | "ne" | "gt" | "gte" | "lt" | "lte" | "in" | "nin", "key": ..., "value": ...}
    {"type": "and" | "or", "filters": [...]}

A file without the attribute passes `ne` and `nin` alone; so does one whose attribute is of another type (a number is
never equal to a string). Strings have no order: gt, gte, lt and lte take numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvstore.search.grown import Array

Attributes = Mapping[str, str | float | bool]

_ORDERS = {"gt": np.greater, "gte": np.greater_equal, "lt": np.less, "lte": np.less_equal}
_DEEPEST = 8  # nested and/or
_MOST = 256  # comparisons
_MOST_COLUMNS = 64  # that are kept: requests name the keys, also such as no file has


class InvalidFilter(ValueError):
    """A filter that cannot be read; the message says where and why."""


def check_filter(value: Any, where: str = "filters") -> None:
    """Check a filter as it came in a request. Raises InvalidFilter."""
    left = [_MOST]

    def check(one: Any, at: str, depth: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise InvalidFilter(f"{where}: more than {_MOST} comparisons")
        if not isinstance(one, Mapping):
            raise InvalidFilter(f"{at}: not an object")
        kind = one.get("type")
        if kind in ("and", "or"):
            inner = one.get("filters")
            if not isinstance(inner, list) or not inner:
                raise InvalidFilter(f"{at}.filters: a list of filters is needed")
            if depth == _DEEPEST:
                raise InvalidFilter(f"{at}: filters are nested more than {_DEEPEST} deep")
            for i, part in enumerate(inner):
                check(part, f"{at}.filters[{i}]", depth + 1)
            return
        if kind not in ("eq", "ne", "in", "nin", *_ORDERS):
            raise InvalidFilter(f"{at}.type: {kind!r} is none of eq, ne, gt, gte, lt, lte, in, nin, and, or")
        if not isinstance(one.get("key"), str):
            raise InvalidFilter(f"{at}.key: a string is needed")
        wanted = one.get("value")
        if kind in ("in", "nin"):
            if not isinstance(wanted, list) or not all(isinstance(each, str | int | float) for each in wanted):
                raise InvalidFilter(f"{at}.value: {kind} takes a list of strings and numbers")
        elif kind in _ORDERS:
            if isinstance(wanted, bool) or not isinstance(wanted, int | float):
                raise InvalidFilter(f"{at}.value: {kind} takes a number")
        elif not isinstance(wanted, str | int | float):
            raise InvalidFilter(f"{at}.value: a string, a number or a boolean is needed")
        for each in wanted if isinstance(wanted, list) else [wanted]:
            if isinstance(each, int) and abs(each) > sys.float_info.max:
                raise InvalidFilter(f"{at}.value: the number is too large")

    check(value, where, 1)


class AttributeColumns:
    """Attributes of files, column by column, for filters."""

    def __init__(self, files: Sequence[Attributes]) -> None:
        self._files = files
        self._columns: dict[str, _Column] = {}

    def mask(self, condition: Mapping[str, Any]) -> Array:
        """Boolean array [files]: those that pass a checked filter."""
        kind = condition["type"]
        if kind in ("and", "or"):
            masks = [self.mask(part) for part in condition["filters"]]
            combined: Array = (np.logical_and if kind == "and" else np.logical_or).reduce(masks)
            return combined
        column, wanted = self._column(condition["key"]), condition["value"]
        if kind in _ORDERS:
            with np.errstate(invalid="ignore"):
                compared: Array = _ORDERS[kind](column.numbers, float(wanted))
            return compared
        values = wanted if kind in ("in", "nin") else [wanted]
        equal = np.zeros(len(self._files), bool)
        for value in values:
            equal |= column.equal(value)
        return ~equal if kind in ("ne", "nin") else equal

    def _column(self, key: str) -> _Column:
        column = self._columns.pop(key, None) or _Column([file.get(key) for file in self._files])
        self._columns[key] = column  # the one that was used last stands last
        if len(self._columns) > _MOST_COLUMNS:
            self._columns.pop(next(iter(self._columns)), None)
        return column


class _Column:
    """One attribute of all files: numbers (NaN: none), and codes of strings and booleans (-1: none)."""

    def __init__(self, values: Sequence[str | float | bool | None]) -> None:
        is_number = [isinstance(value, int | float) and not isinstance(value, bool) for value in values]
        self.numbers = np.array(
            [float(value) if number else np.nan for value, number in zip(values, is_number, strict=True)]  # type: ignore[arg-type]
        )
        self._codes: dict[tuple[type, Any], int] = {}
        self._coded = np.array(
            [
                -1 if value is None or number else self._codes.setdefault((type(value), value), len(self._codes))
                for value, number in zip(values, is_number, strict=True)
            ],
            np.int32,
        )

    def equal(self, value: str | float | bool) -> Array:
        """Boolean array [files]: those whose attribute is this value."""
        if isinstance(value, str | bool):
            code = self._codes.get((type(value), value), -2)
            equal: Array = self._coded == code
            return equal
        same: Array = self.numbers == float(value)
        return same
