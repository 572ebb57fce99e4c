"""ODVG's JSON lines -> a listing: detection lines with boxes of classes, grounding lines with captions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from gdino_lab.data.annotations import Annotation, Fault, Listed, Listing, Problem, Spans, shortened
from gdino_lab.data.formats.fields import entries, four_numbers, optional, parsed, recorded_size, typed
from gdino_lab.errors import ConfigurationError, nearest


def read_label_map(text: str, source: Path) -> dict[int, str]:
    """Class names by label, in ascending order, from {"0": name, ...}.

    Raises:
        ConfigurationError: no such object, or two labels with one name.
    """
    names: dict[int, str] = {}
    complaints = []
    for key, name in parsed(text, str(source), dict).items():
        if not re.fullmatch("0|[1-9][0-9]{0,8}", key):
            complaints.append(f"{source}: key '{key}' is no label; allowed are whole numbers from 0 on")
        elif not isinstance(name, str) or not name.strip():
            complaints.append(f"{source}: label {key} has to have a name that is a text and not empty")
        else:
            names[int(key)] = name.strip()
    labels: dict[str, int] = {}
    for label, name in names.items():
        if (other := labels.setdefault(name.lower(), label)) != label:  # a text model reads lower case
            complaints.append(f"{source}: name '{name}' has two labels, {other} and {label}")
    if complaints:
        raise ConfigurationError(complaints)
    return dict(sorted(names.items()))


def parse_odvg(text: str, source: Path, label_map: Mapping[int, str] | None = None) -> Listing:
    """The images of all lines; an image's id is the number of its line.

    Args:
        text: content of the file.
        source: its path, for complaints.
        label_map: names by label. Without one every instance has to name its category; the names are then in the
            order of their labels, those without a label last.

    Raises:
        ConfigurationError: a line that is no JSON object, a missing key or a wrong type.
    """
    images, problems = [], []
    classes = _Classes(label_map)
    # Not splitlines(): texts may hold a line separator as a character.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"line {number}"
        record = parsed(line, f"{source}: {where}", dict)
        if ("detection" in record) == ("grounding" in record):
            raise ConfigurationError(f"{source}: {where}: either detection or grounding is expected")
        file = typed(record, "filename", str, f"{source}: {where}")
        image = Listed(where, number, file, recorded_size(record, f"{source}: {where}"))
        images.append(image)
        if "detection" in record:
            problems += _detection(image, record, source, classes)
        else:
            problems += _grounding(image, record, source)
    names, order = classes.in_order(source)
    for image in images:
        if image.caption is None:
            image.annotations = [each._replace(label=order[each.label]) for each in image.annotations]
    return Listing(source, names, images, problems)


class _Classes:
    """Class names and their labels: given by a map, or gathered line by line."""

    def __init__(self, label_map: Mapping[int, str] | None):
        self.given = label_map is not None
        self.by_label = dict(label_map or {})
        self.places = {name: index for index, name in enumerate(self.by_label.values())}
        self.labels: dict[str, int] = {name: label for label, name in self.by_label.items()}

    def place(self, label: int | None, category: str) -> int | tuple[Fault, str]:
        """Index that the class has so far, or what is wrong; an empty category follows from its label."""
        category = category or self.by_label.get(label, "")
        if not category:
            return Fault.UNKNOWN_CLASS, f"label {label} is not in the label map, which has {self._known()}"
        if self.given and category not in self.places:
            known = f"which has {self._known()}.{nearest(category, self.places)}"
            return Fault.UNKNOWN_CLASS, f"category '{category}' is not in the label map, {known}"
        if label is not None:
            if (self.by_label.get(label, category), self.labels.get(category, label)) != (category, label):
                return Fault.CONTRADICTION, f"label {label} with category '{category}', elsewhere {self._known()}"
            # Where no map decides, the first line to use a label or a category does.
            self.by_label[label], self.labels[category] = category, label
        return self.places.setdefault(category, len(self.places))

    def in_order(self, source: Path) -> tuple[list[str], list[int]]:
        """The names in order of their labels, and for each place so far the final one."""
        spellings: dict[str, str] = {}
        for name in self.places:
            if (other := spellings.setdefault(name.lower(), name)) != name:  # a text model reads lower case
                raise ConfigurationError(f"{source}: categories '{other}' and '{name}' differ in case only")
        names = sorted(self.places, key=lambda name: self.labels.get(name, float("inf")))
        final = {name: index for index, name in enumerate(names)}
        return names, [final[name] for name in self.places]

    def _known(self) -> str:
        return shortened([f"{label} {name}" for label, name in self.by_label.items()])


def _detection(image: Listed, record: Mapping, source: Path, classes: _Classes) -> list[Problem]:
    """Adds the boxes of a detection line to its image."""
    where = f"{source}: {image.where}"
    problems = []
    for entry, instance in entries(typed(record, "detection", dict, where), "instances", where):
        name = f"{image.where}, {entry}"
        place = f"{source}: {name}"
        label = optional(instance, "label", int, place)
        category = (optional(instance, "category", str, place) or "").strip()
        if not category and not classes.given:
            raise ConfigurationError(f"{place}: names no category; data.label_map names the JSON file of the labels")
        if not category and label is None:
            raise ConfigurationError(f"{place}: has neither label nor category")
        found = classes.place(label, category)
        if not isinstance(found, int):
            problems.append(Problem(found[0], f"{place}: {found[1]}"))
        elif not instance.get("bbox"):
            problems.append(Problem(Fault.NO_BOX, f"{place}: has no bbox"))
        else:
            image.annotations.append(Annotation(name, four_numbers(instance["bbox"], "bbox", place), found))
    return problems


def _grounding(image: Listed, record: Mapping, source: Path) -> list[Problem]:
    """Adds caption, phrases and boxes of a grounding line to its image; one phrase of several regions is one class."""
    where = f"{source}: {image.where}"
    grounding = typed(record, "grounding", dict, where)
    image.caption = caption = typed(grounding, "caption", str, where)
    places: dict[tuple[str, ...], int] = {}
    phrases: list[set[tuple[int, int]]] = []
    problems = []
    for entry, region in entries(grounding, "regions", where):
        name = f"{image.where}, {entry}"
        place = f"{source}: {name}"
        pieces = _pieces(region, place)
        found = _spans(caption, pieces, region.get("tokens_positive"), place)
        if isinstance(found, Problem):
            problems.append(found)
            continue
        boxes = region.get("bbox")
        if not boxes:
            problems.append(Problem(Fault.NO_BOX, f"{place}: has no bbox"))
            continue
        key = tuple(piece.lower() for piece in pieces)
        label = places.setdefault(key, len(places))
        if label == len(phrases):
            phrases.append(set())
        phrases[label].update(found)
        several = isinstance(boxes, list) and isinstance(boxes[0], list)
        for box in boxes if several else [boxes]:
            image.annotations.append(Annotation(name, four_numbers(box, "bbox", place), label))
    image.phrases = tuple(tuple(sorted(spans)) for spans in phrases)
    return problems


def _pieces(region: Mapping, where: str) -> list[str]:
    """The region's phrase; several pieces are one phrase that the caption interrupts."""
    phrase = typed(region, "phrase", (str, list), where)
    pieces = [phrase] if isinstance(phrase, str) else phrase
    if not pieces or not all(isinstance(piece, str) and piece.strip() for piece in pieces):
        raise ConfigurationError(f"{where}: phrase has to be a text or a list of texts, none of them empty")
    return [piece.strip() for piece in pieces]


def _spans(caption: str, pieces: list[str], recorded: object, where: str) -> Spans | Problem:
    if recorded is None:
        spans: list[tuple[int, int]] = []
        for piece in pieces:
            found = located(piece, caption)
            if not found:
                return Problem(Fault.PHRASE, f"{where}: phrase '{piece}' is not in the caption '{caption}'")
            spans += found
        return tuple(spans)
    if not isinstance(recorded, list) or not all(
        isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span) for span in recorded
    ):
        raise ConfigurationError(f"{where}: tokens_positive has to be a list of [start, end] pairs of whole numbers")
    if not recorded or not all(0 <= start < end <= len(caption) for start, end in recorded):
        text = f"tokens_positive {recorded} is not inside the caption, which has {len(caption)} characters"
        return Problem(Fault.PHRASE, f"{where}: {text}")
    return tuple((start, end) for start, end in recorded)


def located(phrase: str, caption: str) -> Spans:
    """Every (start, end) where the phrase stands in the caption as words of its own, in any case."""
    found = re.finditer(rf"(?<!\w){re.escape(phrase)}(?!\w)", caption, re.IGNORECASE)
    return tuple(match.span() for match in found)
