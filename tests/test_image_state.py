"""Per-image parameters: their own Adam, against torch's; killed and continued."""

import copy
import os
import signal
from pathlib import Path

import pytest
import torch

from gaupipe.system.errors import UserError
from gaupipe.teachers.image_state import ImageState, record_words
from processes import exit_code, kill_this_process


def train(state, epochs, first_epoch=0, batch_size=3, stop_after=None):
    """Fits the parameters of every image to a target of its own; every image once an epoch, in an
    order that the epoch determines."""
    target = torch.randn(
        len(state), *state.initial.shape, generator=torch.Generator().manual_seed(7)
    )
    for epoch in range(first_epoch, first_epoch + epochs):
        order = torch.randperm(len(state), generator=torch.Generator().manual_seed(epoch))
        for step, image_ids in enumerate(order.split(batch_size)):
            if step == stop_after:
                return
            parameters = state.gather(image_ids)
            ((parameters - target[image_ids]) ** 4).sum().backward()
            state.update(image_ids, parameters.grad)
        state.commit()


def test_stepping_each_image_at_once_equals_torch_adam_stepped_once_per_epoch(tmp_path):
    N, shape, epochs, options = 10, (2, 3), 5, dict(lr=0.1)
    torch.manual_seed(0)
    target = torch.randn(N, *shape)
    state = ImageState(N, torch.zeros(shape), folder=tmp_path, **options)
    reference = torch.nn.Parameter(torch.zeros(N, *shape))
    optimizer = torch.optim.Adam([reference], **options)
    for _ in range(epochs):
        for image_ids in torch.randperm(N).split(3):  # every image once, in batches of uneven size
            parameters = state.gather(image_ids)
            ((parameters - target[image_ids]) ** 4).sum().backward()
            state.update(image_ids, parameters.grad)
        state.commit()
        optimizer.zero_grad()
        ((reference - target) ** 4).sum().backward()
        optimizer.step()
    torch.testing.assert_close(state.parameters(), reference.detach(), atol=1e-6, rtol=1e-5)
    assert (state.parameters() != 0).all()


def test_an_image_counts_its_own_steps(tmp_path):
    """An image that is updated for the first time late gets the bias correction of a first step: it
    moves by lr."""
    state = ImageState(2, torch.zeros(1), lr=0.1, folder=tmp_path)
    for _ in range(50):
        state.update(torch.tensor([0]), torch.ones(1, 1))
    state.update(torch.tensor([1]), torch.full((1, 1), 1e-3))
    torch.testing.assert_close(state.parameters()[1], torch.tensor([-0.1]), atol=1e-5, rtol=0)
    assert state.steps.tolist() == [50, 1]


def test_an_epoch_that_misses_images_leaves_them_as_they_were(tmp_path):
    """Images that some epochs pass over: never updated, updated before, updated again later."""
    state = ImageState(6, torch.zeros(4), lr=0.1, folder=tmp_path)
    for visited in ([0, 1, 2, 3], [1, 2], [], [2, 3, 4], [2, 3, 4], [0, 1, 2, 3, 4]):
        if visited:
            image_ids = torch.tensor(visited)
            state.update(image_ids, (image_ids.float() + 1).view(-1, 1).expand(-1, 4))
        state.commit()
        parameters = state.parameters()
        state.load_state_dict(state.state_dict())
        assert torch.equal(state.parameters(), parameters)
    steps = torch.tensor([2, 3, 5, 4, 3, 0])  # with an equal gradient each is one of lr
    torch.testing.assert_close(parameters, -0.1 * steps[:, None].expand(-1, 4).float())
    assert state.steps.tolist() == steps.tolist()


@pytest.mark.parametrize("stop_after", [2, None])
def test_an_epoch_without_a_checkpoint_is_repeated_exactly(stop_after, tmp_path):
    """Half an epoch after the checkpoint is thrown away, or a whole one; the run goes on as if it
    had never been."""
    unbroken = ImageState(10, torch.zeros(6), lr=0.1, folder=tmp_path / "unbroken")
    train(unbroken, 5)
    state = ImageState(10, torch.zeros(6), lr=0.1, folder=tmp_path / "rows")
    train(state, 2)
    torch.save(state.state_dict(), tmp_path / "checkpoint.pt")
    train(state, 1, first_epoch=2, stop_after=stop_after)
    again = ImageState(10, torch.zeros(6), lr=0.1, folder=tmp_path / "rows")
    again.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    train(again, 3, first_epoch=2)
    assert torch.equal(again.parameters(), unbroken.parameters())


def test_a_checkpoint_of_records_in_files_is_small_and_costs_no_rewriting(tmp_path):
    state = ImageState(1000, torch.zeros(256), lr=0.1, folder=tmp_path / "rows")
    train(state, 1, batch_size=100)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "rows").iterdir()}
    torch.save(state.state_dict(), tmp_path / "checkpoint.pt")
    assert (tmp_path / "checkpoint.pt").stat().st_size < 1000 * 9 + 256 * 4 + 3000
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "rows").iterdir()}


def test_files_that_do_not_belong_to_the_checkpoint_are_refused(tmp_path):
    state = ImageState(4, torch.zeros(3), lr=0.1, folder=tmp_path / "rows")
    train(state, 1)
    early = copy.deepcopy(state.state_dict())
    train(state, 2, first_epoch=1)

    def fresh(folder=tmp_path / "rows"):
        return ImageState(4, torch.zeros(3), lr=0.1, folder=folder)

    with pytest.raises(UserError, match="of checkpoint 2, state.pt needs those of checkpoint 1"):
        fresh().load_state_dict(early)
    with pytest.raises(UserError, match="missing or unreadable"):
        fresh(tmp_path / "elsewhere").load_state_dict(early)


def test_a_file_cut_short_is_noticed(tmp_path):
    state = ImageState(4, torch.zeros(3), lr=0.1, folder=tmp_path)
    train(state, 2)
    for place in range(2):
        os.truncate(tmp_path / f"records.{place}", 40)
    with pytest.raises(UserError, match="damaged"):
        state.gather(torch.arange(4))


def test_there_is_no_checkpoint_in_the_middle_of_an_epoch_in_files(tmp_path):
    state = ImageState(4, torch.zeros(3), lr=0.1, folder=tmp_path)
    train(state, 1, stop_after=1)
    with pytest.raises(RuntimeError, match="commit"):
        state.state_dict()


def test_nothing_is_written_before_the_first_update(tmp_path):
    state = ImageState(10**7, torch.zeros(4), lr=0.1, folder=tmp_path / "rows")
    assert state.gather(torch.tensor([10**7 - 1])).tolist() == [[0, 0, 0, 0]]
    assert not (tmp_path / "rows").exists()


def test_release_frees_half_of_the_files_and_keeps_the_parameters(tmp_path):
    state = ImageState(50, torch.zeros(40), lr=0.1, folder=tmp_path)
    train(state, 2)
    parameters, size = state.parameters(), 50 * record_words(40) * 4
    again = ImageState(50, torch.zeros(40), lr=0.1, folder=tmp_path)
    again.load_state_dict(state.state_dict())
    again.release()  # another process may do it
    assert sorted((tmp_path / f"records.{place}").stat().st_size for place in range(2)) == [0, size]
    assert torch.equal(again.parameters(), parameters)


def test_a_random_start_depends_on_seed_and_image_id_alone(tmp_path):
    start = {"initial": torch.full((2, 500), 3.0), "lr": 0.1, "folder": tmp_path}
    few, many = (ImageState(n, **start, initial_std=0.5, seed=4) for n in (5, 20))
    assert torch.equal(few.parameters(), many.parameters()[:5])
    assert torch.equal(many.gather(torch.tensor([17, 3])), many.parameters()[[17, 3]])
    other = ImageState(5, **start, initial_std=0.5, seed=5)
    assert not torch.equal(few.parameters(), other.parameters())
    parameters = many.parameters().flatten(1)
    assert parameters.mean().item() == pytest.approx(3, abs=0.02)
    assert parameters.std().item() == pytest.approx(0.5, abs=0.02)
    # 1000 numbers: one sigma is 0.03
    assert parameters.corrcoef().fill_diagonal_(0).abs().max() < 0.2


EPOCHS = 40


def train_and_save(folder: Path, kill: tuple[int, float] | None = None) -> None:
    if kill is not None:
        kill_this_process(folder, *kill)
    state = ImageState(64, torch.zeros(2000), lr=0.1, folder=folder / "rows")
    checkpoint, epoch = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        epoch, saved = torch.load(checkpoint, weights_only=True).values()
        state.load_state_dict(saved)
    while epoch < EPOCHS:
        train(state, 1, epoch, batch_size=4)
        epoch += 1
        torch.save({"epoch": epoch, "state": state.state_dict()}, folder / "partial.pt")
        (folder / "partial.pt").replace(checkpoint)
    torch.save(state.parameters(), folder / "parameters.pt")


@pytest.mark.long
@pytest.mark.parametrize("pause", [0.0, 0.002, 0.01, 0.03])
def test_killed_at_any_moment_the_records_in_files_go_on_exactly(tmp_path, pause):
    unbroken = ImageState(64, torch.zeros(2000), lr=0.1, folder=tmp_path / "unbroken")
    train(unbroken, EPOCHS, batch_size=4)
    for operations in (7, 19):
        assert exit_code(train_and_save, tmp_path, (operations, pause)) == -signal.SIGKILL
    assert exit_code(train_and_save, tmp_path) == 0
    parameters = torch.load(tmp_path / "parameters.pt", weights_only=True)
    assert torch.equal(parameters, unbroken.parameters())
