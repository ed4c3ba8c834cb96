"""examples/segmentation.py, on three generated images and a ViT of two blocks."""

import json
import re

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.metrics import jaccard_score

from gaupipe.models import convert, save_student

H, W = 24, 32  # of the image files
SMALL = [
    *("--size", "16", "24", "--epochs", "2", "--batch", "2", "--classes", "3", "--void", "3", "9"),
    *("--optimizer", "adamw", "--device", "cpu"),
]


def mask_of(index):
    """Class numbers [H, W]: three classes and both numbers of void."""
    mask = np.random.default_rng(index).integers(3, size=(H // 4, W // 4)).repeat(4, 0).repeat(4, 1)
    mask[:3], mask[-2:, :5] = 3, 9
    return mask.astype(np.uint8)


@pytest.fixture
def camvid(tmp_path):
    """A folder in the layout of CamVid, with three images in each part."""
    for number, split in enumerate(("train", "val", "test")):
        for folder in (split, f"{split}annot"):
            (tmp_path / "CamVid" / folder).mkdir(parents=True)
        for i in range(3):
            mask = mask_of(3 * number + i)
            pixels = np.stack([80 * mask, 255 - 60 * mask, mask], axis=-1).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "CamVid" / split / f"{i}.png")
            Image.fromarray(mask).save(tmp_path / "CamVid" / f"{split}annot" / f"{i}.png")
    return tmp_path / "CamVid"


@pytest.fixture
def student(tmp_path):
    """The folder of a ViT with weights large enough for attention to be far from uniform."""
    torch.manual_seed(0)
    model = timm.create_model("gauvit_pico_patch2_8", patch_size=4, embed_dim=16, depth=2)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    save_student(model, tmp_path / "student")
    return tmp_path / "student"


@pytest.fixture
def segment(example, camvid, student, tmp_path):
    module, run = example("segmentation")

    def fine_tune(*more):
        run(camvid, "--model", student, "--out", tmp_path / "runs", *SMALL, *more)

    fine_tune.module = module
    return fine_tune


def test_images_and_masks_are_read_by_name(segment, camvid):
    split = segment.module.read_split(camvid / "val", [16, 24], 3, [3, 9])
    assert split.images.shape == (3, 3, 16, 24) and split.images.dtype == torch.uint8
    for i, mask in enumerate(split.masks):
        expected = mask_of(3 + i)
        expected[expected > 2] = 255
        np.testing.assert_array_equal(mask.numpy(), expected)
    with Image.open(camvid / "val" / "1.png") as image:
        resized = np.asarray(image.resize((24, 16), Image.Resampling.BILINEAR)).astype(int)
    assert abs(split.images[1].permute(1, 2, 0).numpy().astype(int) - resized).max() <= 1


def test_mean_iou_is_that_of_sets_of_pixels(segment):
    """Over all pixels of the split, not the mean over its images."""
    module = segment.module
    draw = np.random.default_rng(0)
    masks, predicted = draw.integers(4, size=(3, 5, 7)), draw.integers(5, size=(3, 5, 7))
    masks[masks == 3], masks[:, 0] = 4, 255  # class 3 does not occur
    counts = sum(
        module.confusion(torch.tensor(p), torch.tensor(m), 5)
        for p, m in zip(predicted, masks, strict=True)
    )
    seen = masks != 255
    expected = jaccard_score(masks[seen], predicted[seen], labels=[0, 1, 2, 4], average=None)
    ious = module.intersection_over_union(counts)
    assert ious[3] is None
    np.testing.assert_allclose([iou for iou in ious if iou is not None], expected)
    np.testing.assert_allclose(module.mean_iou(ious), np.mean(expected))


def test_an_image_and_its_mask_are_cropped_and_flipped_together(segment):
    module = segment.module
    args = type("Options", (), dict(size=[16, 24], crop=[20, 20], scale=[1.0, 1.0]))
    augment = module.augmentation(args, mean=[1.0, 1.0, 1.0])
    mask = torch.arange(200)[:192].view(12, 16).repeat_interleave(2, 0)[:16]
    mask = torch.cat([mask, mask[:, :8]], dim=1).to(torch.uint8)  # [16, 24]
    torch.manual_seed(0)
    seen = set()
    for _ in range(8):
        image, cropped = augment(mask.expand(3, -1, -1), mask[None])
        assert image.shape == (3, 20, 20)
        padded = cropped[0] == 255
        assert padded.any() and (image[0][padded] == 255).all()
        np.testing.assert_array_equal(image[0][~padded], cropped[0][~padded])
        seen.add(cropped.numpy().tobytes())
    assert len(seen) > 2


def test_the_loss_leaves_void_pixels_out(segment):
    scores = torch.randn(1, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    masks = torch.tensor([[[0, 255], [2, 255]]])
    logs = scores.log_softmax(1)[0]
    expected = -(logs[0, 0, 0] + logs[2, 1, 0]) / 2
    torch.testing.assert_close(segment.module.loss_of(lambda x: x, scores, masks), expected)
    nothing = segment.module.loss_of(lambda x: x, scores, torch.full_like(masks, 255))
    assert nothing == 0


def test_every_attention_starts_from_the_same_weights(segment, tmp_path, capsys):
    """The outputs stay for standard and belief2, and for those alone."""
    segment("--attention", "standard", "belief", "belief_star", "belief2", "--test")
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert [row[0].strip() for row in rows[2:]] == ["standard", "belief", "belief_star", "belief2"]
    runs = json.loads((tmp_path / "runs" / "table.json").read_text())
    change = {name: run["change_at_start"] for name, [run] in runs.items()}
    assert change["standard"] == 0 and change["belief2"] < 1e-5
    assert change["belief"] > 1e-2 and change["belief_star"] > 1e-2
    for [run] in runs.values():
        assert len(run["training_loss"]) == len(run["mean_iou"]) == 2
        assert 0 < run["test_mean_iou"] <= 1
    assert runs["belief2"][0]["parameters"] - runs["standard"][0]["parameters"] == 2 * 16 * 16
    losses = [run["training_loss"][0] for [run] in runs.values()]
    assert len(set(losses)) == 4


def test_patches_keep_their_place(segment, student):
    """A decoder that reads one channel gives, patch by patch, that channel of the tokens."""
    module = segment.module
    encoder = timm.create_model(
        f"local-dir:{student}", pretrained=True, num_classes=0, dynamic_img_size=True
    )
    model = module.Segmenter(convert(encoder, "belief2", zz=False), 3).eval()
    images = torch.randint(256, (2, 3, 8, 16), dtype=torch.uint8)
    scores, logits = model.scores(images), model(images)
    assert scores.shape == (2, 3, 2, 4) and logits.shape == (2, 3, 8, 16)
    tokens = module.tokens_of(model.encoder, model.normalise(images))  # [B, T, d]
    for row, column in ((0, 3), (1, 0)):
        expected = model.decoder(tokens[:, 4 * row + column])
        torch.testing.assert_close(scores[:, :, row, column], expected)
    torch.testing.assert_close(logits[..., 0, 0], scores[..., 0, 0])  # a corner is its patch


def change(camvid, name, content):
    path = camvid / name
    if content is None:
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        Image.fromarray(content).save(path)


@pytest.mark.parametrize(
    "broken,more,message",
    [
        (("trainannot/1.png", None), [], "train/1.png has no mask: there is no .*trainannot/1.png"),
        (("valannot/2.png", mask_of(0) + 3), [], r"2.png holds class number \d; --classes 3"),
        (("trainannot/0.png", b"PNG?"), [], "trainannot/0.png: not readable as an image"),
        (("trainannot/0.png", np.zeros((H, W, 3), np.uint8)), [], "0.png has colours"),
        (("trainannot/0.png", np.zeros((8, 4), np.uint8)), [], "4 x 8 pixels, its .* 32 x 24"),
        (None, ["--size", "16", "26"], "--size 16 26: 26 is not a multiple .* 4; 24 or 28 is"),
        (None, ["--classes", "2"], "--classes 2 allows 0 to 1"),
        (None, ["--model", "no_such_vit"], "--model: timm cannot build no_such_vit"),
        (None, ["--model", "resnet18"], "resnet18"),
        (None, ["--model", "no_such_vit", "--pretrained"], "timm has no weights 'no_such_vit'"),
        (None, ["--model", "vit_tiny_patch16_224", "--pretrained"], "download=True"),
        (None, ["--lr", "1e30"], "the loss is (nan|inf)"),
        (None, ["--out", "student/config.json"], "student/config.json: File exists"),
    ],
)  # fmt: skip
def test_what_is_refused_in_one_line(
    segment, camvid, tmp_path, monkeypatch, capsys, broken, more, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    if broken:
        change(camvid, *broken)
    with pytest.raises(SystemExit, match="2"):
        segment("--attention", "standard", *more)
    said = capsys.readouterr().err
    assert re.fullmatch(f"segmentation.py: .*{message}.*\n", said), said
    assert not list((tmp_path / "runs").glob("*"))


def test_a_damaged_or_other_result_is_named(segment, tmp_path, capsys):
    segment("--attention", "standard", "--epochs", "1")
    path = tmp_path / "runs" / "standard-0.json"
    for content, more, message in (
        (path.read_text(), ["--batch", "3"], "batch was 2, now it is 3"),
        (path.read_text()[:-9], [], "standard-0.json is damaged"),
    ):
        path.write_text(content)
        with pytest.raises(SystemExit, match="2"):
            segment("--attention", "standard", *more)
        assert message in capsys.readouterr().err
        assert path.read_text() == content


def test_an_interrupted_training_leaves_the_finished_ones(segment, tmp_path, monkeypatch, capsys):
    started = []
    train_epoch = segment.module.train_epoch

    def interrupted(*given):
        started.append(None)
        if len(started) == 4:
            raise KeyboardInterrupt
        return train_epoch(*given)

    monkeypatch.setattr(segment.module, "train_epoch", interrupted)
    with pytest.raises(SystemExit, match="130"):
        segment("--attention", "standard", "belief")
    assert "the same command continues" in capsys.readouterr().err
    files = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert files == ["standard-0.json", "standard-0.safetensors"]
    segment("--attention", "standard", "belief")
    assert len(started) == 6  # the two epochs of belief
