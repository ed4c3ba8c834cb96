"""Augmentation: its random numbers, its pixels against torchvision on single images, its
geometry, and mixed targets."""

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from gaupipe.data.augment import Augment, crop_boxes, enlarged
from gaupipe.data.draws import philox, uniforms
from gaupipe.data.mixing import mix, mixed_map, mixed_targets
from gaupipe.data.operations import OPERATIONS
from gaupipe.settings.augment import (
    COLOUR_OPERATIONS,
    GEOMETRIC_OPERATIONS,
    AugmentSettings,
    ResizedCropSettings,
)
from gaupipe.settings.load import load

EVERYTHING = AugmentSettings(
    flip=True, crop_padding=3, resized_crop={}, randaugment={}, erasing=0.5
)


def random_images(count: int, channels: int = 3, height: int = 16, width: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(
        0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator
    )


def coordinate_images(count: int, height: int, width: int) -> torch.Tensor:
    """Pixels that hold their own place: channel 0 is 1 + x, channel 1 is 1 + y, channel 2 is
    255; 0 is outside."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    image = torch.stack([1 + x, 1 + y, torch.full_like(x, 255)]).to(torch.uint8)
    return image.expand(count, -1, -1, -1).clone()


# random numbers


@pytest.mark.parametrize(
    "counter,key,expected",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(counter, key, expected):
    words = philox([np.array([word], dtype=np.uint64) for word in counter], key)
    assert tuple(int(word[0]) for word in words) == expected


def test_draws_depend_on_seed_epoch_image_and_stream_only():
    ids = torch.tensor([7, 3, 2**33 + 3, 11])
    draws = uniforms(1, 2, ids, 6, stream=4)
    assert draws.shape == (4, 6) and ((draws > 0) & (draws < 1)).all()
    for place, image_id in enumerate(ids.tolist()):
        np.testing.assert_array_equal(
            draws[place], uniforms(1, 2, np.array([image_id]), 6, stream=4)[0]
        )
    np.testing.assert_array_equal(draws[:, :3], uniforms(1, 2, ids, 3, stream=4))
    for seed, epoch, stream in ((0, 2, 4), (1 + 2**32, 2, 4), (1, 3, 4), (1, 2, 5)):
        assert (draws != uniforms(seed, epoch, ids, 6, stream)).all()


def test_an_image_has_the_same_view_whatever_batch_it_is_in():
    images, ids = random_images(24), torch.arange(24) * 5
    augment, before = Augment(EVERYTHING, seed=3), images.clone()
    views, geometry = augment(images, ids, epoch=2)
    torch.testing.assert_close(images, before, rtol=0, atol=0)
    order = torch.randperm(24)
    for part in (order[:1], order[1:8], order[8:]):
        again, where = Augment(EVERYTHING, seed=3)(images[part], ids[part], epoch=2)
        torch.testing.assert_close(again, views[part], rtol=0, atol=0)
        torch.testing.assert_close(where.offset, geometry.offset[part], rtol=0, atol=0)
        torch.testing.assert_close(where.scale, geometry.scale[part], rtol=0, atol=0)
    assert not torch.equal(augment(images, ids, epoch=3)[0], views)
    assert not torch.equal(Augment(EVERYTHING, seed=4)(images, ids, epoch=2)[0], views)


def test_switching_one_augmentation_on_leaves_the_draws_of_another_alone():
    images, ids = random_images(32), torch.arange(32)
    _, alone = Augment(AugmentSettings(flip=True), 0)(images, ids, 0)
    _, both = Augment(AugmentSettings(flip=True, crop_padding=2, erasing=1.0), 0)(images, ids, 0)
    torch.testing.assert_close(alone.scale, both.scale, rtol=0, atol=0)


# geometry


def test_shifts_and_flips_are_torchvisions_padded_crop():
    images = random_images(40, height=12, width=10)
    views, geometry = Augment(AugmentSettings(flip=True, crop_padding=4), 5)(
        images, torch.arange(40), 1
    )
    size = torch.tensor([10, 12])
    left_top = (geometry.offset * size / 2).round().int() + 4
    mirrored = geometry.scale[:, 0] < 0
    places = zip(images, views, left_top.tolist(), mirrored, strict=True)
    for image, view, (left, top), flip in places:
        expected = F.crop(F.pad(image, [4]), top, left, 12, 10)
        torch.testing.assert_close(
            view, F.horizontal_flip(expected) if flip else expected, rtol=0, atol=0
        )
    assert 8 < mirrored.sum() < 32 and left_top.min() == 0 and left_top.max() == 8


def test_resized_crops_are_torchvisions_and_lie_where_their_geometry_says():
    images = random_images(40, height=24, width=20)
    settings = AugmentSettings(resized_crop={"scale": (0.2, 0.9)})
    views, geometry = Augment(settings, 0)(images, torch.arange(40), 0)
    size = torch.tensor([20.0, 24.0])
    extent = geometry.scale * size
    left_top = (geometry.offset + 1) * size / 2 - extent / 2
    torch.testing.assert_close(extent, extent.round(), atol=1e-4, rtol=0)
    torch.testing.assert_close(left_top, left_top.round(), atol=1e-4, rtol=0)
    boxes = zip(extent.round().int().tolist(), left_top.round().int().tolist(), strict=True)
    for image, view, ((w, h), (left, top)) in zip(images, views, boxes, strict=True):
        assert 0 <= left <= 20 - w and 0 <= top <= 24 - h
        pil = F.resized_crop(F.to_pil_image(image), top, left, h, w, [24, 20])
        assert (F.pil_to_tensor(pil).int() - view.int()).abs().max() <= 1
    areas, ratios = extent.prod(1) / 480, extent[:, 0] / extent[:, 1]
    # whole pixels: a little beyond the bounds
    assert areas.min() > 0.16 and areas.max() < 0.96 and areas.std() > 0.1
    assert ratios.min() > 0.6 and ratios.max() < 1.6


@pytest.mark.parametrize("channels,height,width", [(1, 8, 8), (3, 32, 32), (3, 33, 50)])
def test_boxes_are_enlarged_as_torchvision_does_it_image_by_image(channels, height, width):
    images = random_images(200, channels, height, width)
    draws = uniforms(1, 0, np.arange(200), 40, stream=0)
    boxes = crop_boxes(draws, (height, width), ResizedCropSettings(scale=(0.01, 1.0)))
    boxes[:3] = [0, 0, height, width], [0, 0, 1, 1], [height - 1, width - 1, 1, 1]
    for image, box, view in zip(images, boxes.tolist(), enlarged(images, boxes), strict=True):
        exact = F.resized_crop(image.double(), *box, [height, width], antialias=True)
        assert (view - exact).abs().max() < 0.51, box


def test_resized_crop_then_shift_then_flip_compose():
    settings = AugmentSettings(resized_crop={"scale": (0.4, 1.0)}, crop_padding=4, flip=True)
    size = 32
    views, geometry = Augment(settings, 1)(coordinate_images(64, size, size), torch.arange(64), 0)
    checked = 0
    for view, offset, scale in zip(views.float(), geometry.offset, geometry.scale, strict=True):
        for y in range(6, size - 6, 3):
            for x in range(6, size - 6, 3):
                if view[2, y, x] == 0:
                    continue
                border = torch.tensor([(x + 0.5) / size, (y + 0.5) / size]) * 2 - 1
                place = (offset + scale * border + 1) / 2 * size - 0.5 + 1
                assert (view[:2, y, x] - place).abs().max() < 0.51 + 0.02  # uint8 rounding
                checked += 1
    assert checked > 3000


def test_a_crop_that_never_fits_is_the_largest_in_the_middle():
    settings = AugmentSettings(resized_crop={"scale": (0.9, 1.0)})
    _, geometry = Augment(settings, 0)(random_images(4, height=8, width=25), torch.arange(4), 0)
    torch.testing.assert_close(geometry.scale, torch.tensor([11 / 25, 1.0]).expand(4, 2))
    torch.testing.assert_close(geometry.offset, torch.zeros(4, 2), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "options", [{}, {"randaugment": {}}, {"erasing": 1.0}, {"flip": True, "geometry": "ignore"}]
)
def test_no_geometry_is_reported_where_nothing_is_to_follow(options):
    images = random_images(4)
    views, geometry = Augment(AugmentSettings(**options), 0)(images, torch.arange(4), 0)
    assert geometry is None and (options or torch.equal(views, images))


# colours and erasing


@pytest.mark.parametrize("name", [*COLOUR_OPERATIONS, *GEOMETRIC_OPERATIONS])
@pytest.mark.parametrize("channels", [1, 3])
def test_an_operation_on_a_batch_is_torchvisions_on_each_image(name, channels):
    images = random_images(6, channels)
    images[1] = images[1] // 4 + 60  # little contrast, so that stretching it shows
    reference = v2.RandAugment()
    magnitudes, signed = reference._AUGMENTATION_SPACE[name]
    for magnitude in (0, 9, 20, 30):
        for sign in (-1, 1):
            values = magnitudes(31, 16, 16)
            value = 0 if values is None else values[magnitude].item()
            if isinstance(value, float):
                # with more digits: the last bit of a factor can decide how a pixel is rounded
                first, last = np.round(values[[0, -1]].tolist(), 6)
                value = (first + (last - first) * (magnitude / 30)) * (sign if signed else 1)
            result = OPERATIONS[name](images, magnitude / 30, sign)
            for image, own in zip(images, result, strict=True):
                expected = reference._apply_image_or_video_transform(
                    image,
                    name,
                    value,
                    interpolation=v2.InterpolationMode.NEAREST,
                    fill={torch.Tensor: None},
                )
                torch.testing.assert_close(own, expected, rtol=0, atol=0)


def test_randaugment_draws_every_operation_and_applies_as_many_as_asked():
    images = random_images(1).expand(400, -1, -1, -1)
    one = Augment(AugmentSettings(randaugment={"ops": 1}), 0)(images, torch.arange(400), 0)[0]
    possible = [
        OPERATIONS[name](images[:1], 0.3, sign)[0] for name in COLOUR_OPERATIONS for sign in (-1, 1)
    ]
    seen = {next(i for i, view in enumerate(possible) if torch.equal(view, own)) for own in one}
    assert seen == {
        i for i, view in enumerate(possible) if not any(torch.equal(view, p) for p in possible[:i])
    }
    two = Augment(AugmentSettings(randaugment={"ops": 2}), 0)(images[:50], torch.arange(50), 0)[0]
    operations = [(OPERATIONS[name], sign) for name in COLOUR_OPERATIONS for sign in (-1, 1)]
    pairs = [act(view[None], 0.3, sign)[0] for view in possible for act, sign in operations]
    assert all(any(torch.equal(view, pair) for pair in pairs) for view in two)


@pytest.mark.parametrize("channels", [1, 3])
def test_erasing_fills_one_rectangle_with_one_colour(channels):
    images = torch.full((300, channels, 16, 20), 77, dtype=torch.uint8)
    views, _ = Augment(AugmentSettings(erasing=0.4), 0)(images, torch.arange(300), 0)
    erased = 0
    for view in views:
        changed = (view != 77).any(0)
        if not changed.any():
            continue
        erased += 1
        rows, columns = changed.any(1).nonzero().flatten(), changed.any(0).nonzero().flatten()
        box = view[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert changed.sum() == box[0].numel() and (box == box[:, :1, :1]).all()
        assert 0.01 < box[0].numel() / 320 < 0.4
    assert abs(erased - 120) < 5 * (300 * 0.4 * 0.6) ** 0.5


# settings


@pytest.mark.parametrize("scale,words", [((1.0, 0.5), "smaller first"), ((0.5, 1.5), "none above")])
def test_bounds_of_a_crop_that_mean_nothing_are_refused(scale, words):
    with pytest.raises(ValueError, match=words):
        AugmentSettings(resized_crop={"scale": scale})


def test_randaugment_moves_pixels_only_where_geometry_is_ignored():
    follow, ignore = (
        AugmentSettings(geometry=geometry, randaugment={"ops": 1}, flip=True)
        for geometry in ("follow", "ignore")
    )
    assert follow.operations == COLOUR_OPERATIONS
    assert ignore.operations == (*COLOUR_OPERATIONS, *GEOMETRIC_OPERATIONS)
    images = coordinate_images(400, 16, 16)
    for settings, moves in ((follow, False), (ignore, True)):
        views, geometry = Augment(settings, 0)(images, torch.arange(400), 0)
        assert (geometry is None) == moves
        uncovered = (views[:, :2] == 0).all(1).flatten(1).any(1)  # pixels from outside the image
        assert bool((uncovered & (views[:, 2] == 0).flatten(1).any(1)).any()) == moves


def test_phase_a_augments_if_it_is_told_to_and_mixes_no_images_for_gaussians():
    given = ["augment={flip: true, mixup: 0.2, cutmix: 1}"]
    assert load("digits_expected", given).phase_a_augment == AugmentSettings()
    given.append("phase_a.augment=true")
    assert load("digits_expected", given).phase_a_augment == AugmentSettings(flip=True)
    settings = load("digits_expected", [*given, "phase_a.teacher=vit"])
    assert settings.phase_a_augment == settings.augment


# Mixup and CutMix

MIXUP, CUTMIX = AugmentSettings(mixup=0.8), AugmentSettings(cutmix=1.0)
BOTH = AugmentSettings(mixup=0.8, cutmix=1.0)


@pytest.mark.parametrize("settings", [MIXUP, CUTMIX, BOTH])
def test_partners_are_other_images_and_do_not_depend_on_places_in_the_batch(settings):
    images, ids = torch.randn(17, 3, 12, 8), torch.arange(17) * 3 + 5
    mixed_images, mixed = mix(images, ids, 0, 4, settings)
    assert sorted(mixed.partner.tolist()) == list(range(17))
    assert (mixed.partner != torch.arange(17)).all()
    order = torch.randperm(17)
    again, other = mix(images[order], ids[order], 0, 4, settings)
    torch.testing.assert_close(again, mixed_images[order], rtol=0, atol=0)
    torch.testing.assert_close(order[other.partner], mixed.partner[order], rtol=0, atol=0)
    torch.testing.assert_close(other.weight, mixed.weight[order], rtol=0, atol=0)
    assert not torch.equal(mix(images, ids, 0, 5, settings)[1].partner, mixed.partner)


def test_mixup_is_the_weighted_mean_of_two_images():
    images = torch.randn(20, 3, 8, 8)
    mixed_images, mixed = mix(images, torch.arange(20), 0, 0, MIXUP)
    weight = mixed.weight.float().view(-1, 1, 1, 1)
    expected = weight * images + (1 - weight) * images[mixed.partner]
    torch.testing.assert_close(mixed_images, expected)
    assert mixed.weight.std() > 0.2


def test_cutmix_puts_a_box_of_the_partner_over_the_image_and_its_weight_is_what_stays():
    images = torch.randn(60, 3, 12, 20)
    mixed_images, mixed = mix(images, torch.arange(60), 0, 0, CUTMIX)
    for own, partner, result, weight in zip(
        images, mixed.partner, mixed_images, mixed.weight, strict=True
    ):
        is_own, is_other = (result == own).all(0), (result == images[partner]).all(0)
        assert (is_own ^ is_other).all()
        assert is_own.float().mean().item() == pytest.approx(weight.item(), abs=1e-6)
        rows, columns = is_other.any(1), is_other.any(0)
        torch.testing.assert_close(is_other, rows[:, None] & columns, rtol=0, atol=0)
        assert all((line.int().diff() != 0).sum() <= 2 for line in (rows, columns))  # of one piece
    assert mixed.weight.std() > 0.2


def test_shares_follow_the_beta_distributions_of_the_settings():
    _, mixup = mix(torch.zeros(4000, 1, 2, 2), torch.arange(4000), 0, 0, MIXUP)
    _, cutmix = mix(torch.zeros(1000, 1, 64, 64), torch.arange(1000), 0, 0, CUTMIX)
    reference = np.sort(np.random.default_rng(0).beta(0.8, 0.8, 400_000))
    ranks = np.searchsorted(reference, np.sort(mixup.weight.numpy())) / 400_000
    assert np.abs(ranks - (np.arange(4000) + 0.5) / 4000).max() < 1.95 / 4000**0.5
    assert cutmix.weight.mean() > 0.6  # cut boxes leave more than half on average


def test_with_both_on_every_image_draws_one_of_the_two():
    _, mixed = mix(torch.zeros(2000, 1, 16, 16), torch.arange(2000), 0, 0, BOTH)
    cut = mixed.blend == 1
    assert 850 < cut.sum() < 1150
    assert (mixed.box[~cut] == 0).all() and (mixed.box[cut] != 0).any(1).float().mean() > 0.9


def test_off_or_alone_an_image_stays_as_it_is():
    images = torch.randn(3, 1, 4, 4)
    same, mixed = mix(images, torch.arange(3), 0, 0, AugmentSettings())
    assert same is images and mixed is None
    maps = torch.rand(3, 2, 4, 4)
    assert mixed_map(maps, None, (2, 2)) is maps and mixed_targets(maps, None) is maps
    alone, mixed = mix(images[:1], torch.tensor([8]), 0, 0, BOTH)
    torch.testing.assert_close(alone, images[:1])


@pytest.mark.parametrize("settings", [MIXUP, CUTMIX, BOTH])
def test_mixed_maps_are_the_mean_of_both_sources_rows_by_the_querys_share(settings):
    grid, count = (4, 5), 12
    images = torch.randn(count, 3, 16, 20)
    maps = torch.rand(count, 2, 20, 20).softmax(-1)
    mixed_images, mixed = mix(images, torch.arange(count), 0, 0, settings)
    result = mixed_map(maps, mixed, grid)
    torch.testing.assert_close(result.sum(-1), torch.ones(count, 2, 20))
    for place in range(count):
        partner = int(mixed.partner[place])
        for query in range(20):
            y, x = query // 5 * 4, query % 5 * 4
            if settings is MIXUP:
                share = mixed.blend[place].item()
            else:
                token, own, other = (
                    pixels[:, y : y + 4, x : x + 4]
                    for pixels in (mixed_images[place], images[place], images[partner])
                )
                share = ((token - other) / (own - other)).mean().item()
            expected = share * maps[place, :, query] + (1 - share) * maps[partner, :, query]
            torch.testing.assert_close(result[place, :, query], expected, atol=2e-5, rtol=0)


def test_mixed_targets_weigh_both_classes():
    labels = torch.tensor([2, 0, 1, 1])
    _, mixed = mix(torch.zeros(4, 1, 8, 8), torch.arange(4), 0, 0, BOTH)
    targets = mixed_targets(nnf.one_hot(labels, 3).float(), mixed)
    for place in range(4):
        expected = np.zeros(3)
        expected[labels[place]] += mixed.weight[place].item()
        expected[labels[mixed.partner[place]]] += 1 - mixed.weight[place].item()
        np.testing.assert_allclose(targets[place], expected, atol=1e-6)


@pytest.mark.parametrize("settings", [BOTH, AugmentSettings(mixup=0.8), AugmentSettings(cutmix=1)])
def test_the_class_with_the_larger_share_of_a_mixed_image_counts_as_right(settings):
    labels = torch.randint(3, (64,), generator=torch.Generator().manual_seed(0))
    _, mixed = mix(torch.zeros(64, 1, 8, 8), torch.arange(64), 0, 0, settings)
    targets = mixed_targets(nnf.one_hot(labels, 3).float(), mixed)
    assert (targets.argmax(-1) != labels).any()
    assert torch.equal(mixed.main_labels(labels), targets.argmax(-1))
