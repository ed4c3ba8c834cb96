"""Image ids in buckets: batches are the same for every world size, and no image is lost."""

import numpy as np
import pytest
import torch

from gaupipe.data.buckets import BLOCK, Buckets, check_buckets
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.teachers.image_state import ImageState


@pytest.fixture
def as_rank(monkeypatch):
    """Makes this process one rank of a world, without a process group."""

    def become(rank: int, size: int) -> None:
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        monkeypatch.setattr(distributed, "world_size", lambda: size)

    return become


def whole_batches(buckets, as_rank, world: int, batch_size: int) -> list[list[int]]:
    """The ids of each batch over all ranks, sorted."""
    rank_epochs = []
    for rank in range(world):
        as_rank(rank, world)
        rank_epochs.append(buckets.epoch(3, 1, batch_size))
    as_rank(0, 1)
    return [
        sorted(np.concatenate([ids for parts in step for ids in parts.values()]).tolist())
        for step in zip(*rank_epochs, strict=True)
    ]


@pytest.mark.parametrize("images,batch_size", [(1000, 64), (999, 37), (161, 161), (257, 16)])
def test_whole_batches_do_not_depend_on_the_world_size(images, batch_size, as_rank):
    buckets = Buckets(images, 4)
    alone = whole_batches(buckets, as_rank, 1, batch_size)
    for world in (2, 4):
        assert whole_batches(buckets, as_rank, world, batch_size) == alone
    assert sorted(number for batch in alone for number in batch) == list(range(images))
    sizes = [len(batch) for batch in alone]
    assert len(sizes) == -(-images // batch_size) and max(sizes) - min(sizes) <= 1
    assert buckets.batch_sizes(batch_size) == sizes


def test_one_bucket_is_one_permutation_in_full_batches():
    order = np.random.default_rng((5, 2)).permutation(100)
    steps = Buckets(100).epoch(5, 2, 32)
    assert [len(step[0]) for step in steps] == [32, 32, 32, 4]
    assert np.array_equal(np.concatenate([step[0] for step in steps]), order)


@pytest.mark.parametrize(
    "images,count,batch_size,world,words",
    [
        (1000, 2, 64, 4, "2 buckets cannot be shared by 4 processes"),
        (1000, 1, 64, 2, "data.buckets a multiple of 2"),
        (100, 8, 10, 1, "take fewer"),
    ],
)
def test_buckets_that_do_not_work_are_refused(images, count, batch_size, world, words, as_rank):
    as_rank(0, world)
    with pytest.raises(UserError, match=words):
        check_buckets(images, count, batch_size)


N = 5 * BLOCK + 3


def make(numbers, folder, count=2) -> ImageState:
    start = {"lr": 0.1, "folder": folder, "initial_std": 0.5}
    return ImageState(Buckets(N, count), torch.zeros(3), numbers=numbers, **start)


def test_parameters_in_buckets_are_those_of_one_state(tmp_path):
    """The same start, the same updates, the same numbers, whatever the order of the ids."""
    whole = make([0], tmp_path / "whole", 1)
    parts = make([0, 1], tmp_path)
    for epoch in range(2):
        for ids in torch.randperm(N, generator=torch.Generator().manual_seed(epoch)).split(20):
            gathered = parts.gather(ids)
            torch.testing.assert_close(gathered, whole.read(ids), rtol=0, atol=0)
            assert gathered.requires_grad
            gradient = torch.randn(len(ids), 3)
            whole.update(ids, gradient)
            parts.update(ids, gradient)
        parts.commit()
    torch.testing.assert_close(
        parts.read(torch.arange(N)), whole.read(torch.arange(N)), rtol=0, atol=0
    )
    with pytest.raises(KeyError):
        make([1], tmp_path).read(torch.tensor([0]))
