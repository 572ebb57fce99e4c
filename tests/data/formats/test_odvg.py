"""ODVG lines are read right, or refused by line and key; phrases are found as words and never inside one."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdino_lab.data.annotations import Fault, Listing
from gdino_lab.data.formats.odvg import located, parse_odvg, read_label_map
from gdino_lab.errors import ConfigurationError

SOURCE = Path("some/train.jsonl")
MAP = {0: "nut", 1: "washer", 5: "long screw"}
CAPTION = "A nut left of a washer; the Nut is small, the nutcracker is not."


def od(*instances, **changes) -> dict:
    line = {"filename": "a.jpg", "height": 40, "width": 60, "detection": {"instances": list(instances)}}
    return line | changes


def vg(*regions, caption=CAPTION, **changes) -> dict:
    line = {"filename": "b.jpg", "height": 40, "width": 60, "grounding": {"caption": caption, "regions": list(regions)}}
    return line | changes


def box(label=None, category=None, bbox=(1, 2, 3, 4)) -> dict:
    named = {"label": label, "category": category}
    return {"bbox": bbox} | {key: value for key, value in named.items() if value is not None}


def region(phrase, *boxes, **more) -> dict:
    return {"phrase": phrase, "bbox": list(boxes) or [1, 2, 3, 4]} | more


def text(*lines) -> str:
    return "\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n"


def parse(*lines, label_map=None) -> Listing:
    return parse_odvg(text(*lines), SOURCE, label_map)


def complaint(*lines, label_map=None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        parse(*lines, label_map=label_map)
    (found,) = caught.value.complaints
    assert found.startswith(f"{SOURCE}: ")
    return found


def labels(listing: Listing) -> list[list[int]]:
    return [[each.label for each in image.annotations] for image in listing.images]


def test_detection_lines_with_a_label_map():
    listing = parse(od(box(5), box(0, "nut"), box(category="washer")), od(), label_map=MAP)
    assert listing.names == ["nut", "washer", "long screw"] and labels(listing) == [[2, 0, 1], []]
    assert [(image.id, image.file, image.size, image.caption) for image in listing.images] == [
        (1, "a.jpg", (40, 60), None), (2, "a.jpg", (40, 60), None)
    ]  # fmt: skip
    assert listing.images[0].annotations[0].box == (1, 2, 3, 4) and listing.problems == []


def test_without_a_label_map_the_labels_give_the_order():
    listing = parse(od(box(category="bag"), box(3, "washer")), od(box(1, "nut"), box(3, "washer")))
    assert listing.names == ["nut", "washer", "bag"] and labels(listing) == [[2, 1], [0, 1]]


def test_empty_lines_and_line_separators_in_a_text_are_no_ends_of_lines():
    lines = text(od(box(0, "nut"))) + "\n  \n" + text(vg(region("nut"), caption="a nut\u2028\x85of steel"))
    listing = parse_odvg(lines.replace("\n", "\r\n"), SOURCE)
    assert [image.id for image in listing.images] == [1, 4] and listing.problems == []


@pytest.mark.parametrize(
    ("instance", "label_map", "fault", "named"),
    [
        (box(7), MAP, Fault.UNKNOWN_CLASS, "label 7 .* 5 long screw"),
        (box(category="washr"), MAP, Fault.UNKNOWN_CLASS, "'washr' .* Did you mean 'washer'"),
        (box(0, "washer"), MAP, Fault.CONTRADICTION, "label 0 .*'washer'"),
        (box(7, "washer"), MAP, Fault.CONTRADICTION, "label 7 .*'washer'"),
        (box(0, "washer"), None, Fault.CONTRADICTION, "label 0 .*'washer'.* 0 nut"),
        (box(2, "nut"), None, Fault.CONTRADICTION, "label 2 .*'nut'.* 0 nut"),
        (box(0, "nut", []), None, Fault.NO_BOX, "bbox"),
    ],
)
def test_what_a_repair_can_mend_is_a_problem(instance, label_map, fault, named):
    listing = parse(od(box(0, "nut")), od(instance, box(0, "nut")), label_map=label_map)
    (problem,) = listing.problems
    assert problem.fault is fault and re.search(named, problem.text), problem
    assert problem.text.startswith(f"{SOURCE}: line 2, instances[0]: ")
    assert labels(listing) == [[0], [0]] and listing.names == (list(MAP.values()) if label_map else ["nut"])


def test_a_contradiction_does_not_become_the_rule():
    listing = parse(od(box(0, "nut"), box(1, "nut"), box(1, "washer"), box(1, "bolt")))
    assert listing.names == ["nut", "washer"] and labels(listing) == [[0, 1]] and len(listing.problems) == 2
    listing = parse(od(box(7, "nut"), box(7)), label_map=MAP)
    assert labels(listing) == [[]] and len(listing.problems) == 2


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"filename": "a.jpg"}, "either detection or grounding"),
        (od() | vg(), "either detection or grounding"),
        (od(filename=None), "filename"),
        (od(height="40"), "height"),
        (od(detection=[]), "detection"),
        (od(detection={}), "instances"),
        (od(3), "instances[0]"),
        (od(box("0", "nut")), "label"),
        (od(box(0, 3)), "category"),
        (od(box(0)), "data.label_map"),
        (od(box(0, "nut", [1, 2, 3])), "bbox"),
        (vg(caption=None), "caption"),
        (vg(grounding={"caption": "a"}), "regions"),
        (vg("nut"), "regions[0]"),
        (vg(region(None)), "phrase"),
        (vg(region([])), "phrase"),
        (vg(region(["nut", " "])), "phrase"),
        (vg(region("nut", [1, 2])), "bbox"),
        (vg(region("nut", tokens_positive=[2, 5])), "tokens_positive"),
        (vg(region("nut", tokens_positive=[[2.0, 5]])), "tokens_positive"),
        ([], "an object"),
    ],
    ids=str,
)
def test_wrong_lines_are_refused_by_line_and_key(line, named):
    found = complaint(od(), line)
    assert "line 2" in found and named in found


def test_a_line_that_is_no_json_is_refused_by_number():
    with pytest.raises(ConfigurationError, match="line 2: not readable"):
        parse_odvg(text(od()) + '{"filename": ', SOURCE)


def test_an_instance_without_label_and_category_is_refused_even_with_a_map():
    assert "neither label nor category" in complaint(od(box()), label_map=MAP)


def test_categories_that_differ_in_case_only_are_refused():
    assert "'nut' and 'Nut'" in complaint(od(box(category="nut"), box(category="Nut")))


def test_a_phrase_is_every_occurrence_of_it_as_words():
    listing = parse(vg(region("nut"), region("washer", [5, 5, 9, 9])))
    (image,) = listing.images
    assert image.caption == CAPTION and listing.names == [] and listing.problems == []
    assert [[CAPTION[start:end] for start, end in spans] for spans in image.phrases] == [["nut", "Nut"], ["washer"]]
    assert [(each.box, each.label) for each in image.annotations] == [((1, 2, 3, 4), 0), ((5, 5, 9, 9), 1)]


def test_recorded_spans_come_before_searching():
    (image,) = parse(vg(region("small nut", tokens_positive=[[28, 31], [35, 40]]))).images
    assert image.phrases == (((28, 31), (35, 40)),)
    assert [CAPTION[start:end] for start, end in image.phrases[0]] == ["Nut", "small"]


def test_one_phrase_of_several_regions_is_one_class():
    first, second, third = (
        region("nut", tokens_positive=[[2, 5]]),
        region("washer"),
        region("Nut ", [5, 5, 6, 6], [6, 6, 7, 7], tokens_positive=[[28, 31]]),
    )
    (image,) = parse(vg(first, second, third)).images
    assert [each.label for each in image.annotations] == [0, 1, 0, 0]
    assert image.phrases[0] == ((2, 5), (28, 31)) and len(image.phrases) == 2


def test_a_phrase_in_pieces_is_one_class_with_the_spans_of_all():
    (image,) = parse(vg(region(["washer", "small"]))).images
    assert [CAPTION[start:end] for start, end in image.phrases[0]] == ["washer", "small"]


@pytest.mark.parametrize(
    "wrong",
    [
        region("bolt"),
        region("was"),
        region(["nut", "bolt"]),
        region("nut", tokens_positive=[[2, 500]]),
        region("nut", tokens_positive=[[5, 5]]),
        region("nut", tokens_positive=[[-1, 5]]),
        region("nut", tokens_positive=[]),
    ],
    ids=str,
)
def test_a_phrase_that_is_not_in_the_caption_is_a_problem(wrong):
    listing = parse(od(), vg(wrong, region("washer")))
    ((fault, found),) = listing.problems
    assert fault is Fault.PHRASE and found.startswith(f"{SOURCE}: line 2, regions[0]: ")
    image = listing.images[1]
    assert [each.label for each in image.annotations] == [0] and len(image.phrases) == 1


def test_a_caption_without_regions_is_a_negative():
    (image,) = parse(vg()).images
    assert image.annotations == [] and image.phrases == ()


def test_both_kinds_of_line_may_be_mixed():
    listing = parse(vg(region("washer"), region("nut")), od(box(1, "washer"), box(0, "nut")))
    assert listing.names == ["nut", "washer"] and labels(listing) == [[0, 1], [1, 0]]


words = st.text("abéß中1_", min_size=1, max_size=2)


@given(st.lists(words, min_size=1, max_size=8), st.lists(words, min_size=1, max_size=2), st.sampled_from([" ", ", "]))
def test_located_is_what_comparing_word_by_word_finds(caption, phrase, gap):
    joined, sought = gap.join(caption), gap.join(phrase)
    starts = [len(gap.join([*caption[:index], ""])) if index else 0 for index in range(len(caption))]
    equal = [start for index, start in enumerate(starts) if caption[index : index + len(phrase)] == phrase]
    length = len(sought)
    free = [start for place, start in enumerate(equal) if all(start >= other + length for other in equal[:place])]
    if len(phrase) == 1:
        assert located(sought, joined) == tuple((start, start + len(sought)) for start in equal)
    else:  # occurrences may overlap; the first one counts
        assert {start for start, _ in located(sought, joined)} >= set(free)
    assert located(sought.upper().replace("SS", "ß"), joined) == located(sought, joined)


@given(st.text(max_size=12), st.text(min_size=1, max_size=3))
def test_located_spans_hold_the_phrase_and_touch_no_letter(caption, phrase):
    for start, end in located(phrase, caption):
        assert re.fullmatch(re.escape(phrase), caption[start:end], re.IGNORECASE)
        assert not re.match(r"\w", caption[end:]) and not re.search(r"\w$", caption[:start])


def test_a_label_map_is_read_in_the_order_of_its_labels():
    assert list(read_label_map('{"10": "b", "2": " a "}', SOURCE).items()) == [(2, "a"), (10, "b")]


@pytest.mark.parametrize(
    ("content", "count"),
    [
        ("[]", 1),
        ("{", 1),
        ('{"nut": "0"}', 1),
        ('{"-1": "a", "0": 3, "1": " "}', 3),
        ('{"0": "nut", "1": "Nut"}', 1),
        ('{"0": "nut", "00": "bolt"}', 1),
    ],
)
def test_a_label_map_that_is_none_is_refused(content, count):
    with pytest.raises(ConfigurationError) as caught:
        read_label_map(content, SOURCE)
    assert len(caught.value.complaints) == count
    assert all(found.startswith(f"{SOURCE}: ") for found in caught.value.complaints)


scalars = st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.sampled_from(["nut", "", CAPTION])
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4), max_leaves=6)
inner = st.dictionaries(st.sampled_from(["bbox", "label", "category", "phrase", "tokens_positive"]), values)
outer = st.dictionaries(st.sampled_from(["instances", "regions", "caption"]), st.lists(inner, max_size=2) | values)
line = st.dictionaries(st.sampled_from(["filename", "height", "detection", "grounding"]), values | outer)


@given(st.lists(line, max_size=3), st.none() | st.just(MAP))
def test_any_lines_are_read_or_refused(lines, label_map):
    try:
        listing = parse(*lines, label_map=label_map)
    except ConfigurationError as error:
        assert all(found.startswith(f"{SOURCE}: line ") for found in error.complaints)
    else:
        for image in listing.images:
            count = len(listing.names) if image.caption is None else len(image.phrases)
            assert all(0 <= each.label < count for each in image.annotations)
