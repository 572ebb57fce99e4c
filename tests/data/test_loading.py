"""Which samples make up a step: the same for any number of ranks, and from any place on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
import torch
from torch.utils.data import TensorDataset

from gdino_lab.data.loading import EpochSampler


def places(images: int, rank: int, world: int, epoch: int, start: int = 0, shuffle: bool = True):
    sampler = EpochSampler(TensorDataset(torch.zeros(images)), rank, world, seed=5, shuffle=shuffle)
    sampler.set_position(epoch, start)
    assert len(list(sampler)) == len(sampler)
    return list(sampler)


@given(world=st.integers(1, 4), accumulation=st.integers(1, 3), steps=st.integers(1, 6), epoch=st.integers(0, 5))
def test_a_step_holds_the_same_images_on_any_number_of_ranks(world, accumulation, steps, epoch):
    batch = world * accumulation
    images = batch * steps
    alone = places(images, 0, 1, epoch)
    shared = [places(images, rank, world, epoch) for rank in range(world)]
    for step in range(steps):
        together = {place for rank in shared for place in rank[step * accumulation : (step + 1) * accumulation]}
        assert together == set(alone[step * batch : (step + 1) * batch])


@given(images=st.integers(1, 40), start=st.integers(0, 40))
def test_starting_later_gives_the_rest(images, start):
    assert places(images, 0, 1, 2, start) == places(images, 0, 1, 2)[start:]


@given(images=st.integers(1, 40), world=st.integers(1, 5))
def test_every_image_is_seen_and_ranks_have_equally_many(images, world):
    shares = [places(images, rank, world, 0, shuffle=False) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    assert {index for share in shares for _, index in share} == set(range(images))


def test_epochs_are_shuffled_differently_and_repeatably():
    assert places(50, 0, 1, 0) != [(0, index) for _, index in places(50, 0, 1, 1)]
    assert places(50, 0, 1, 1) == places(50, 0, 1, 1)
