"""Typed access to parsed JSON: what has the wrong type is refused with the file's name and the key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gdino_lab.errors import ConfigurationError

# JSON's names, for complaints.
TYPES = {dict: "an object", list: "a list", str: "a text", int: "a whole number", float: "a number"}


def parsed(text: str, where: str, kind: type) -> Any:
    """The JSON text as a value of `kind`.

    Raises:
        ConfigurationError: not JSON, or another kind of value.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: not readable as JSON ({error})") from None
    if not isinstance(value, kind):
        raise ConfigurationError(f"{where}: {TYPES[kind]} is expected, found {_shown(value)}")
    return value


def typed(record: Mapping, key: str, kinds: type | tuple[type, ...], where: str) -> Any:
    """record[key], of one of `kinds`.

    Raises:
        ConfigurationError: missing or of another type; true and false are no numbers.
    """
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    value = record.get(key)
    if not isinstance(value, kinds) or isinstance(value, bool):
        expected = " or ".join(TYPES[kind] for kind in kinds)
        found = f"found {_shown(value)}" if key in record else "it is missing"
        raise ConfigurationError(f"{where}: {key} has to be {expected}, {found}")
    return value


def optional(record: Mapping, key: str, kinds: type | tuple[type, ...], where: str) -> Any:
    """As `typed`, or None for a key that is missing or null."""
    return None if record.get(key) is None else typed(record, key, kinds, where)


def entries(record: Mapping, key: str, where: str) -> Iterator[tuple[str, Mapping]]:
    """The objects of the list record[key], each with its place, such as "images[3]".

    Raises:
        ConfigurationError: no list, or an entry that is no object.
    """
    for index, entry in enumerate(typed(record, key, list, where)):
        name = f"{key}[{index}]"
        if not isinstance(entry, Mapping):
            raise ConfigurationError(f"{where}: {name} has to be an object, found {_shown(entry)}")
        yield name, entry


def four_numbers(value: Any, key: str, where: str) -> tuple[float, float, float, float]:
    """A box's numbers, finite or not.

    Raises:
        ConfigurationError: anything but a list of four numbers.
    """
    if (
        not isinstance(value, list)
        or len(value) != 4
        or not all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in value)
    ):
        raise ConfigurationError(f"{where}: {key} has to be four numbers, found {_shown(value)}")
    return tuple(map(_float, value))


def recorded_size(record: Mapping, where: str) -> tuple[int, int] | None:
    """(height, width) in pixels, or None where either is not recorded.

    Raises:
        ConfigurationError: recorded, but not as whole numbers.
    """
    height, width = (optional(record, key, int, where) for key in ("height", "width"))
    return None if height is None or width is None else (height, width)


def _float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # a whole number of hundreds of digits
        return float("inf")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
