"""Rows of single images: their own Adam, against torch's."""

import torch

from gaupipe.image_state import ImageState


def test_stepping_each_row_at_once_equals_torch_adam_stepped_once_per_epoch():
    N, shape, epochs, options = 10, (2, 3), 5, dict(lr=0.1, betas=(0.9, 0.99), eps=1e-8)
    torch.manual_seed(0)
    target = torch.randn(N, *shape)
    state = ImageState(N, torch.zeros(shape), **options)
    reference = torch.nn.Parameter(torch.zeros(N, *shape))
    optimizer = torch.optim.Adam([reference], **options)
    for _ in range(epochs):
        for image_ids in torch.randperm(N).split(3):  # every image once, in batches of uneven size
            rows = state.gather(image_ids)
            ((rows - target[image_ids]) ** 4).sum().backward()
            state.update(image_ids, rows.grad)
        optimizer.zero_grad()
        ((reference - target) ** 4).sum().backward()
        optimizer.step()
    torch.testing.assert_close(state.rows, reference.detach(), atol=1e-6, rtol=1e-5)
    assert (state.rows != 0).all()


def test_a_row_counts_its_own_steps():
    """A row that is updated for the first time late gets the bias correction of a first step: it moves by lr."""
    state = ImageState(2, torch.zeros(1), lr=0.1)
    for _ in range(50):
        state.update(torch.tensor([0]), torch.ones(1, 1))
    state.update(torch.tensor([1]), torch.full((1, 1), 1e-3))
    torch.testing.assert_close(state.rows[1], torch.tensor([-0.1]), atol=1e-5, rtol=0)
    assert state.steps.tolist() == [50, 1]


def test_untouched_rows_do_not_change():
    state = ImageState(4, torch.full((3,), 7.0), lr=0.1)
    state.update(torch.tensor([2]), torch.ones(1, 3))
    assert (state.rows[[0, 1, 3]] == 7).all() and (state.rows[2] < 7).all()


def test_gather_is_a_leaf_that_collects_a_gradient():
    state = ImageState(3, torch.zeros(2), lr=0.1)
    rows = state.gather(torch.tensor([2, 0]))
    (rows * torch.tensor([[1.0, 2], [3, 4]])).sum().backward()
    assert rows.is_leaf and rows.grad.tolist() == [[1, 2], [3, 4]]


def test_state_survives_a_round_trip():
    first, second = ImageState(3, torch.zeros(2), lr=0.1), ImageState(3, torch.ones(2), lr=0.1)
    first.update(torch.tensor([1]), torch.ones(1, 2))
    second.load_state_dict(first.state_dict())
    for state in (first, second):
        state.update(torch.tensor([1, 2]), torch.ones(2, 2))
    assert torch.equal(first.rows, second.rows)
