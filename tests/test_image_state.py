"""Per-image parameters: their own Adam, against torch's; and continued."""

import os

import pytest
import torch

from gaupipe.data.buckets import Buckets
from gaupipe.system.errors import UserError
from gaupipe.teachers.image_state import ImageState, record_size


def everything(state):
    """The parameters of all images."""
    return state.read(torch.arange(state.buckets.images))


def train(state, epochs, first_epoch=0, batch_size=3, stop_after=None):
    """Fits the parameters of every image to a target of its own; every image once an epoch, in an
    order that the epoch determines."""
    generator = torch.Generator().manual_seed(7)
    target = torch.randn(state.buckets.images, *state.initial.shape, generator=generator)
    for epoch in range(first_epoch, first_epoch + epochs):
        order = torch.randperm(state.buckets.images, generator=torch.Generator().manual_seed(epoch))
        for step, image_ids in enumerate(order.split(batch_size)):
            if step == stop_after:
                return
            parameters = state.gather(image_ids)
            ((parameters - target[image_ids]) ** 4).sum().backward()
            state.update(image_ids, parameters.grad)
        state.commit()


def test_stepping_each_image_at_once_equals_torch_adam_stepped_once_per_epoch(tmp_path):
    """Each image has an Adam of its own, which counts the epochs that it is in."""
    N, shape = 10, (2, 3)
    torch.manual_seed(0)
    target = torch.randn(N, *shape)
    state = ImageState(Buckets(N), torch.zeros(shape), lr=0.1, folder=tmp_path)
    references = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(N)]
    optimizers = [torch.optim.Adam([reference], lr=0.1) for reference in references]
    for seen in (9, 9, 9, 0, 3, 8, 9):  # image 9 is never seen
        for image_ids in torch.randperm(seen).split(4) if seen else ():
            parameters = state.gather(image_ids)
            ((parameters - target[image_ids]) ** 4).sum().backward()
            state.update(image_ids, parameters.grad)
            for image in image_ids:
                optimizers[image].zero_grad()
                ((references[image] - target[image]) ** 4).sum().backward()
                optimizers[image].step()
        state.commit()
        state.load(tmp_path, state.save(tmp_path, "0"))
    expected = torch.stack(references).detach()
    torch.testing.assert_close(everything(state), expected, atol=1e-6, rtol=1e-5)
    assert state.steps.tolist() == [6, 6, 6, 5, 5, 5, 5, 5, 4, 0]


@pytest.mark.parametrize("stop_after", [2, None])
def test_an_epoch_without_a_checkpoint_is_repeated_exactly(stop_after, tmp_path):
    """Half an epoch after the checkpoint is thrown away, or a whole one; the run goes on as if it
    had never been."""
    unbroken = ImageState(Buckets(10), torch.zeros(6), lr=0.1, folder=tmp_path / "unbroken")
    train(unbroken, 5)
    state = ImageState(Buckets(10), torch.zeros(6), lr=0.1, folder=tmp_path / "rows")
    train(state, 2)
    saved = state.save(tmp_path, "2")
    train(state, 1, first_epoch=2, stop_after=stop_after)
    again = ImageState(Buckets(10), torch.zeros(6), lr=0.1, folder=tmp_path / "rows")
    again.load(tmp_path, saved)
    train(again, 3, first_epoch=2)
    torch.testing.assert_close(everything(again), everything(unbroken), rtol=0, atol=0)


def test_a_checkpoint_of_records_in_files_is_small_and_costs_no_rewriting(tmp_path):
    state = ImageState(Buckets(1000), torch.zeros(256), lr=0.1, folder=tmp_path / "rows")
    train(state, 1, batch_size=100)
    rows = tmp_path / "rows" / "bucket-0000"
    before = {path: path.stat().st_mtime_ns for path in rows.iterdir()}
    [file] = state.save(tmp_path, "1")["buckets"]
    assert (tmp_path / file).stat().st_size < 1000 * 5 + 3000
    assert before == {path: path.stat().st_mtime_ns for path in rows.iterdir()}


def test_files_that_do_not_belong_to_the_checkpoint_are_refused(tmp_path):
    state = ImageState(Buckets(4), torch.zeros(3), lr=0.1, folder=tmp_path / "rows")
    train(state, 1)
    early = state.save(tmp_path, "1")
    train(state, 2, first_epoch=1)

    def fresh(folder=tmp_path / "rows"):
        return ImageState(Buckets(4), torch.zeros(3), lr=0.1, folder=folder)

    with pytest.raises(UserError, match="of checkpoint 2, state.pt needs those of checkpoint 1"):
        fresh().load(tmp_path, early)
    with pytest.raises(UserError, match="missing or unreadable"):
        fresh(tmp_path / "elsewhere").load(tmp_path, early)


def test_a_file_cut_short_is_noticed_and_half_an_epoch_is_no_checkpoint(tmp_path):
    state = ImageState(Buckets(4), torch.zeros(3), lr=0.1, folder=tmp_path)
    train(state, 2)
    train(state, 1, stop_after=1)
    with pytest.raises(RuntimeError, match="commit"):
        state.save(tmp_path, "3")
    for place in range(2):
        os.truncate(tmp_path / "bucket-0000" / f"records.{place}", 40)
    with pytest.raises(UserError, match="damaged"):
        state.gather(torch.arange(4))


def test_nothing_is_written_before_the_first_update(tmp_path):
    state = ImageState(Buckets(10**7), torch.zeros(4), lr=0.1, folder=tmp_path / "rows")
    assert state.gather(torch.tensor([10**7 - 1])).tolist() == [[0, 0, 0, 0]]
    assert not (tmp_path / "rows").exists()


def test_release_frees_half_of_the_files_and_keeps_the_parameters(tmp_path):
    state = ImageState(Buckets(50), torch.zeros(40), lr=0.1, folder=tmp_path)
    train(state, 2)
    parameters, size = everything(state), 50 * record_size(40) * 4
    again = ImageState(Buckets(50), torch.zeros(40), lr=0.1, folder=tmp_path)
    again.load(tmp_path, state.save(tmp_path, "2"))
    again.release()  # another process may do it
    files = (tmp_path / "bucket-0000").glob("records.*")
    assert sorted(path.stat().st_size for path in files) == [0, size]
    torch.testing.assert_close(everything(again), parameters, rtol=0, atol=0)


def test_a_random_start_depends_on_seed_and_image_id_alone(tmp_path):
    start = {"initial": torch.full((2, 500), 3.0), "lr": 0.1, "folder": tmp_path}
    few, many, other = (
        ImageState(Buckets(n), **start, initial_std=0.5, seed=seed)
        for n, seed in ((5, 4), (20, 4), (5, 5))
    )
    torch.testing.assert_close(everything(few), everything(many)[:5], rtol=0, atol=0)
    torch.testing.assert_close(
        many.gather(torch.tensor([17, 3])), everything(many)[[17, 3]], rtol=0, atol=0
    )
    assert not torch.equal(everything(few), everything(other))
    parameters = everything(many).flatten(1)
    assert parameters.mean().item() == pytest.approx(3, abs=0.02)
    assert parameters.std().item() == pytest.approx(0.5, abs=0.02)
    # 1000 numbers: one sigma is 0.03
    assert parameters.corrcoef().fill_diagonal_(0).abs().max() < 0.2
