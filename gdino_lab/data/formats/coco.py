"""COCO's instances JSON -> a listing: any ids in any order, images without annotations are negatives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gdino_lab.data.annotations import Annotation, Fault, Listed, Listing, Problem, shortened
from gdino_lab.data.formats.fields import entries, four_numbers, parsed, recorded_size, typed
from gdino_lab.errors import ConfigurationError


def parse_coco(text: str, source: Path) -> Listing:
    """The file's images with their boxes; names in order of ascending category id.

    Args:
        text: content of the file.
        source: its path, for complaints.

    Raises:
        ConfigurationError: no JSON, a missing key, a wrong type, or categories that cannot be told apart.
    """
    content = parsed(text, str(source), dict)
    if missing := [key for key in ("images", "annotations", "categories") if key not in content]:
        raise ConfigurationError(f"{source}: {key} is missing" for key in missing)
    names = _categories(content, source)
    images, problems = _images(content, source)
    places = {category: index for index, category in enumerate(names)}
    seen: set[str] = set()
    for place, record in entries(content, "annotations", str(source)):
        where = f"{source}: {place}"
        name = place if record.get("id") is None else f"annotation {typed(record, 'id', (int, str), where)}"
        owner, category = typed(record, "image_id", (int, str), where), typed(record, "category_id", int, where)
        crowd = record.get("iscrowd") or 0
        if crowd not in (0, 1):
            raise ConfigurationError(f"{where}: iscrowd has to be 0 or 1, found {crowd!r}")
        if name in seen:
            problems.append(Problem(Fault.ANNOTATION_ID, f"{source}: {name}: another annotation has this id too"))
        seen.add(name)
        if owner not in images:
            text = f"image_id {owner!r} is not among the {len(images)} images"
            problems.append(Problem(Fault.UNKNOWN_IMAGE, f"{source}: {name}: {text}"))
        elif category not in names:
            known = shortened([f"{number} {known}" for number, known in names.items()])
            text = f"category_id {category} is not in categories, which has {known}"
            problems.append(Problem(Fault.UNKNOWN_CLASS, f"{source}: {name}: {text}"))
        elif not record.get("bbox"):
            text = "has a segmentation but no bbox" if record.get("segmentation") else "has no bbox"
            problems.append(Problem(Fault.NO_BOX, f"{source}: {name}: {text}"))
        else:
            x, y, width, height = four_numbers(record["bbox"], "bbox", where)
            box = (x, y, x + width, y + height)
            area = record.get("area")
            if area is not None and (isinstance(area, bool) or not isinstance(area, (int, float))):
                raise ConfigurationError(f"{where}: area has to be a number, found {area!r}")
            images[owner].annotations.append(Annotation(name, box, places[category], bool(crowd), area))
    return Listing(source, list(names.values()), list(images.values()), problems)


def _categories(content: Mapping, source: Path) -> dict[int, str]:
    """Names by id, in ascending order of the ids."""
    names: dict[int, str] = {}
    ids: dict[str, int] = {}
    complaints = []
    for place, record in entries(content, "categories", str(source)):
        where = f"{source}: {place}"
        category, name = typed(record, "id", int, where), typed(record, "name", str, where).strip()
        other = ids.setdefault(name.lower(), category)  # a text model reads lower case
        if not name:
            complaints.append(f"{where}: name is empty")
        elif category in names:
            complaints.append(f"{source}: category id {category} is '{names[category]}' and '{name}'")
        elif other != category:
            complaints.append(f"{source}: category name '{name}' has two ids, {other} and {category}")
        names.setdefault(category, name)
    if complaints:
        raise ConfigurationError(complaints)
    return dict(sorted(names.items()))


def _images(content: Mapping, source: Path) -> tuple[dict[int | str, Listed], list[Problem]]:
    """Images by id, without their annotations; of two with one id the first."""
    images: dict[int | str, Listed] = {}
    problems = []
    for place, record in entries(content, "images", str(source)):
        where = f"{source}: {place}"
        own, file = typed(record, "id", (int, str), where), typed(record, "file_name", str, where)
        if own in images:
            text = f"{source}: image id {own!r} is '{images[own].file}' and '{file}'"
            problems.append(Problem(Fault.IMAGE_ID, text))
        else:
            images[own] = Listed(f"image {own}", own, file, recorded_size(record, where))
    return images, problems
