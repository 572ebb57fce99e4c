"""Class names and captions -> prompt tokens, with the exact tokens that name each class.

A prompt is a row of phrases, each closed by '.', the last included: transformers lets the tokens of a phrase see each
other only up to its '.', and an open last phrase would read padding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from gdino_lab.errors import ConfigurationError

# What Grounding DINO's text mask takes for the end of a phrase: '[CLS]', '[SEP]', '.' and '?' in BERT's vocabulary.
CLS, SEP, STOP, QUESTION = DELIMITERS = (101, 102, 1012, 1029)
# The model's `max_text_len`: more it cannot see.
MAX_TOKENS = 256

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Prompt:
    """input_ids; spans: for each class in the prompt, the positions of its tokens; classes: which classes these are."""

    input_ids: tuple[int, ...]
    spans: tuple[tuple[int, ...], ...]
    classes: tuple[int, ...]

    def tokens_of(self, classes: Sequence[int], length: int) -> Tensor:
        """(len(classes), length) bool: the tokens that name each of `classes`."""
        rows = torch.zeros(len(classes), length, dtype=torch.bool)
        for row, wanted in enumerate(classes):
            rows[row, list(self.spans[self.classes.index(wanted)])] = True
        return rows


class Vocabulary:
    """The class names of a data set as tokens.

    Args:
        where: names the source in complaints, such as "data".

    Raises:
        ConfigurationError: names that are empty, cannot be told apart or cannot be kept whole; every one of them.
    """

    def __init__(self, names: Sequence[str], tokenizer: PreTrainedTokenizerBase, where: str = "data"):
        self.where = where
        self.names = [plain(name) for name in names]
        self.notices = [
            f"{where}: class name {before!r} is prompted as {after!r}: '.' and '?' end a phrase"
            for before, after in zip(names, self.names, strict=True)
            if " ".join(before.split()) != after
        ]
        self.tokens = [tokenizer.encode(name, add_special_tokens=False) for name in self.names]
        complaints, seen = [], {}
        for name, tokens in zip(names, self.tokens, strict=True):
            if not tokens:
                complaints.append(f"{where}: class name {name!r} is empty; a class needs a word to be asked for by")
            elif set(tokens) & set(DELIMITERS):
                complaints.append(f"{where}: class name {name!r} holds a delimiter of prompts and cannot be kept whole")
            elif set(tokens) == {tokenizer.unk_token_id}:
                complaints.append(
                    f"{where}: class name {name!r} has no character the tokenizer knows; rename the class in words of "
                    "the model's language"
                )
            elif len(tokens) + 3 > MAX_TOKENS:
                complaints.append(f"{where}: class name {name!r} has {len(tokens)} tokens, a prompt holds {MAX_TOKENS}")
            elif tuple(tokens) in seen:
                complaints.append(
                    f"{where}: class names {seen[tuple(tokens)]!r} and {name!r} are the same to the tokenizer; rename one"
                )
            seen.setdefault(tuple(tokens), name)
        if complaints:
            raise ConfigurationError(complaints)

    def prompt(self, classes: Sequence[int] | None = None) -> Prompt:
        """The prompt that asks for `classes`, by default for all, in that order."""
        classes = range(len(self.tokens)) if classes is None else classes
        ids, spans = [CLS], []
        for index in classes:
            spans.append(tuple(range(len(ids), len(ids) + len(self.tokens[index]))))
            ids += [*self.tokens[index], STOP]
        return Prompt((*ids, SEP), tuple(spans), tuple(classes))

    def overflow(self) -> str | None:
        """The name at which a prompt of all classes outgrows the model, or None where it fits."""
        used = 2 + np.cumsum([len(tokens) + 1 for tokens in self.tokens])
        return None if not len(used) or used[-1] <= MAX_TOKENS else self.names[int(np.argmax(used > MAX_TOKENS))]

    def chunks(self) -> list[list[int]]:
        """All classes in as few consecutive groups as have room in a prompt each."""
        groups, room = [], 0
        for index, tokens in enumerate(self.tokens):
            if len(tokens) + 1 > room:
                groups.append([])
                room = MAX_TOKENS - 2
            groups[-1].append(index)
            room -= len(tokens) + 1
        return groups

    def sampled(self, positives: Sequence[int], rng: np.random.Generator) -> list[int]:
        """`positives` and as many other classes, drawn at random, as have room in a prompt.

        Raises:
            ValueError: not even the positives have.
        """
        room = MAX_TOKENS - 2 - sum(len(self.tokens[index]) + 1 for index in set(positives))
        if room < 0:
            raise ValueError(f"the names of its classes alone need more than the {MAX_TOKENS} tokens of a prompt")
        chosen = set(positives)
        for index in rng.permutation(len(self.tokens)).tolist():
            cost = len(self.tokens[index]) + 1
            if index not in chosen and cost <= room:
                chosen.add(index)
                room -= cost
        return sorted(chosen)


def plain(name: str) -> str:
    """A class name without what would end its phrase, spaces made single."""
    return " ".join(re.sub(r"[.?]", " ", name).split())


def caption_prompt(caption: str, phrases: Sequence[Spans], tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """A caption as prompt, each phrase in it a class.

    Args:
        phrases: the [start, end) character spans of each phrase.

    Raises:
        ValueError: the caption has too many tokens, or a phrase has none, or reaches over the end of a sentence.
    """
    closed = caption if caption.rstrip().endswith((".", "?")) else f"{caption.rstrip()} ."
    encoded = tokenizer(closed, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    if len(ids) > MAX_TOKENS:
        raise ValueError(f"the caption has {len(ids)} tokens, a prompt holds {MAX_TOKENS}")
    spans = [
        tuple(
            position
            for position, (token, (start, end)) in enumerate(zip(ids, offsets, strict=True))
            if token not in DELIMITERS and any(start < high and low < end for low, high in phrase)
        )
        for phrase in phrases
    ]
    if () in spans:
        raise ValueError(f"phrase {spans.index(())} of the caption covers no token")
    ends = [position for position, token in enumerate(ids) if token in DELIMITERS]
    for number, phrase in enumerate(phrases):
        for low, high in phrase:
            if any(low <= offsets[end][0] < high - 1 for end in ends if offsets[end][0] < offsets[end][1]):
                raise ValueError(f"phrase {number} of the caption, {caption[low:high]!r}, reaches over a '.' or '?'")
    return Prompt(tuple(ids), tuple(spans), tuple(range(len(phrases))))


def padded(prompts: Sequence[Prompt], pad_id: int) -> dict[str, Tensor]:
    """The model's text inputs, each (B, L) int64: input_ids, attention_mask, token_type_ids."""
    length = max(len(prompt.input_ids) for prompt in prompts)
    ids = torch.full((len(prompts), length), pad_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt.input_ids)] = torch.tensor(prompt.input_ids)
        mask[row, : len(prompt.input_ids)] = 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
