"""Which samples make up a step: the same for any number of ranks, and from any place on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
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


READER = """
import os, signal, time
import torch
from torch.utils.data import Dataset
from gdino_lab.data.loading import EpochSampler, loader

class Slow(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, place):
        time.sleep(0.5)
        return torch.tensor(place)

if __name__ == "__main__":
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        signal.signal(number, lambda *_: None)  # as a rank does, which ends by itself
    dataset = Slow()
    batches = iter(loader(dataset, EpochSampler(dataset, 0, 1, seed=0, shuffle=False), 1, 2, torch.stack, False))
    found = [next(batches)]
    for number in numbers:
        os.killpg(0, number)
    found += batches
    del batches  # and with it its processes, which a stop signal no longer ends
    print(torch.cat(found)[:, 1].tolist())
"""


@pytest.mark.slow
def test_a_stop_signal_for_all_leaves_the_rank_its_data(tmp_path: Path):
    """Data processes look every five seconds whether what forked them is there: reading goes on for longer than that."""
    (tmp_path / "reader.py").write_text(READER)
    command = [sys.executable, str(tmp_path / "reader.py")]
    ended = subprocess.run(command, start_new_session=True, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == str(list(range(32)))
