"""Class names and captions as prompts: K names give exactly K spans in order, whatever they are made of."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertTokenizer

from gdino_lab.errors import ConfigurationError
from gdino_lab.models.grounding_dino import build, random_weights_processor
from gdino_lab.models.prompts import DELIMITERS, MAX_TOKENS, Vocabulary, caption_prompt, padded
from tests.models.test_export import NANO

TOKENIZER = random_weights_processor().tokenizer
names = st.lists(
    st.text(st.sampled_from("abc nut.?-é7"), min_size=1, max_size=12), min_size=1, max_size=8
)


def words(prompt, span) -> str:
    return TOKENIZER.decode([prompt.input_ids[position] for position in span]).replace(" ", "")


@settings(max_examples=200, deadline=None)
@given(names)
def test_names_give_as_many_spans_in_order_or_are_refused(given_names):
    try:
        vocabulary = Vocabulary(given_names, TOKENIZER)
    except ConfigurationError:
        return
    prompt = vocabulary.prompt()
    assert prompt.classes == tuple(range(len(given_names))) and len(prompt.spans) == len(given_names)
    # The same tokens as the whole text gives, so transformers' own processor would ask the same.
    text = " ".join(f"{name} ." for name in vocabulary.names)
    assert list(prompt.input_ids) == TOKENIZER(text)["input_ids"]
    assert prompt.input_ids[-2:] == (1012, 102)
    covered = [position for span in prompt.spans for position in span]
    assert covered == sorted(set(covered))
    assert all((token in DELIMITERS) == (place not in covered) for place, token in enumerate(prompt.input_ids))
    for name, span in zip(vocabulary.names, prompt.spans, strict=True):
        assert words(prompt, span) == TOKENIZER.decode(TOKENIZER.encode(name, add_special_tokens=False)).replace(" ", "")


def test_a_delimiter_in_a_name_is_rewritten_and_said():
    vocabulary = Vocabulary(["st. bernard", "who?"], TOKENIZER, "data")
    assert vocabulary.names == ["st bernard", "who"]
    assert len(vocabulary.notices) == 2 and "'st. bernard' is prompted as 'st bernard'" in vocabulary.notices[0]
    assert len(vocabulary.prompt().spans) == 2
    assert not Vocabulary(["a  b"], TOKENIZER).notices


def test_a_contained_name_gets_its_own_tokens():
    """Substring search would find 'nut' inside 'nutcase' (or 'container' inside 'containernumber')."""
    vocabulary = Vocabulary(["containernumber", "container", "nut"], TOKENIZER)
    prompt = vocabulary.prompt()
    assert [words(prompt, span) for span in prompt.spans] == ["containernumber", "container", "nut"]
    assert not set(prompt.spans[0]) & set(prompt.spans[1])


@pytest.mark.parametrize(
    ("given_names", "said"),
    [
        (["fish", "fish"], "'fish' and 'fish' are the same"),
        (["Café", "cafe"], "'Café' and 'cafe' are the same"),
        (["a.b", "a b"], "'a.b' and 'a b' are the same"),
        (["nut", ""], "'' is empty"),
        (["..."], "'...' is empty"),
        (["a [SEP] b"], "holds a delimiter"),
        (["螺丝"], "'螺丝' has no character the tokenizer knows"),
        (["nut " * 300], "has 300 tokens"),
    ],
)
def test_names_that_cannot_be_told_apart_or_kept_whole_are_refused_by_name(given_names, said):
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        Vocabulary(given_names, TOKENIZER)


def test_every_bad_name_is_named_at_once():
    with pytest.raises(ConfigurationError) as caught:
        Vocabulary(["", "fish", "fish", "螺丝"], TOKENIZER)
    assert len(caught.value.complaints) == 3


def many(count: int) -> list[str]:
    return [f"part {index}" for index in range(count)]


def test_overflow_names_the_class_at_which_the_budget_ends():
    assert Vocabulary(many(20), TOKENIZER).overflow() is None
    vocabulary = Vocabulary(many(200), TOKENIZER)
    at = vocabulary.names.index(vocabulary.overflow())
    assert len(vocabulary.prompt(range(at)).input_ids) <= MAX_TOKENS < len(vocabulary.prompt(range(at + 1)).input_ids)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.data())
def test_chunks_hold_every_class_once_and_fit(count, data):
    vocabulary = Vocabulary(many(count), TOKENIZER)
    chunks = vocabulary.chunks()
    assert [index for chunk in chunks for index in chunk] == list(range(count))
    assert all(len(vocabulary.prompt(chunk).input_ids) <= MAX_TOKENS for chunk in chunks)
    positives = data.draw(st.lists(st.integers(0, count - 1), max_size=20))
    chosen = vocabulary.sampled(positives, np.random.default_rng(0))
    assert set(positives) <= set(chosen) and chosen == sorted(set(chosen))
    length = len(vocabulary.prompt(chosen).input_ids)
    assert length <= MAX_TOKENS
    assert len(chosen) == count or length > MAX_TOKENS - 6  # no room for one more


def test_positives_without_room_are_refused():
    with pytest.raises(ValueError, match="alone need more than the 256 tokens"):
        Vocabulary(many(300), TOKENIZER).sampled(range(200), np.random.default_rng(0))


def test_caption_spans_come_from_token_offsets():
    caption = "A containernumber on the container, left of 2 nuts"
    phrases = [((2, 17),), ((25, 34),), ((46, 50),), ((2, 17), (46, 50))]
    prompt = caption_prompt(caption, phrases, TOKENIZER)
    assert [words(prompt, span) for span in prompt.spans] == ["containernumber", "container", "nuts", "containernumbernuts"]
    assert prompt.input_ids[-2:] == (1012, 102)
    assert caption_prompt("a nut.", [((2, 5),)], TOKENIZER).input_ids[-3:] != (1012, 1012, 102)


@pytest.mark.parametrize(
    ("caption", "phrases", "said"),
    [
        ("nut " * 300, [((0, 3),)], "tokens"),
        ("a . b", [((2, 3),)], "phrase 0"),
        ("a st. bernard dog", [((0, 1),), ((2, 17),)], r"phrase 1 .*'st. bernard dog', reaches over"),
    ],
)
def test_captions_that_cannot_be_prompts(caption, phrases, said):
    with pytest.raises(ValueError, match=said):
        caption_prompt(caption, phrases, TOKENIZER)


def test_a_closed_prompt_reads_no_padding():
    """An open last phrase sees padding if there is some: transformers' logits then depend on the rest of the batch."""
    torch.manual_seed(0)
    model = build("grounding_dino", config=NANO)[0].eval()
    vocabulary = Vocabulary(["nut", "long screw"], TOKENIZER)
    pixels = {"pixel_values": torch.randn(1, 3, 64, 96), "pixel_mask": torch.ones(1, 64, 96, dtype=torch.long)}

    def logits(length: int):
        filler = Vocabulary(many(length), TOKENIZER).prompt() if length else vocabulary.prompt()
        text = {key: value[:1] for key, value in padded([vocabulary.prompt(), filler], 0).items()}
        with torch.no_grad():
            return model(**pixels, **text).logits[..., : len(vocabulary.prompt().input_ids)]

    torch.testing.assert_close(logits(0), logits(9), rtol=0, atol=1e-4)


def test_tokens_of_a_class_asked_for_in_a_subset():
    prompt = Vocabulary(["nut", "long screw", "washer"], TOKENIZER).prompt([0, 2])
    rows = prompt.tokens_of([2, 0, 2], 10)
    assert [row.nonzero().flatten().tolist() for row in rows] == [list(prompt.spans[1]), list(prompt.spans[0]), list(prompt.spans[1])]
    assert prompt.tokens_of([], 10).shape == (0, 10)


def test_bert_has_the_delimiters_where_they_are_looked_for():
    assert isinstance(TOKENIZER, BertTokenizer)
    assert tuple(TOKENIZER.convert_tokens_to_ids(["[CLS]", "[SEP]", ".", "?"])) == DELIMITERS
