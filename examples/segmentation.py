"""Fine-tunes a ViT with gaupipe's attentions to label the pixels of images.

    python examples/segmentation.py CamVid --model deit_tiny_patch16_224 --download
    python examples/segmentation.py CamVid --model student --attention standard belief2 --seeds 0 1

Every attention starts from the same weights. ``CamVid`` is a folder with images in train, val and
test, and masks in trainannot, valannot and testannot. Every finished training is a file in
``--out`` and is not repeated.
"""

import argparse
import hashlib
import math
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import resolve_model_data_config
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms import v2

from cells import in_one_line, kept, mean_and_spread, write_json
from gaupipe.attention import comparing
from gaupipe.data.decoding import is_image, read_rgb, refusing
from gaupipe.models import STUDENT_FILES, convert
from gaupipe.system.errors import UserError
from gaupipe.vit.build import create_model
from gaupipe.vit.pretrained import load_pretrained
from gaupipe.vit.saving import load_folder

OPTIONS = {"belief2": {"zz": False}}  # as the Belief2 paper advises for trained weights
VOID = 255
"""The class number of pixels that do not count."""


def positive(text):
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def at_least_0(text):
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return number


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("data", type=Path, help="a folder with train, trainannot, val, valannot, test, testannot")
    add("--model", required=True, help="a timm name, or the folder of a student")
    add("--pretrained", action="store_true", help="timm's weights, if they are on this machine")
    add("--download", action="store_true", help="timm's weights, fetched where they are not here")
    default = ["standard", "belief", "belief_star", "belief2"]
    add("--attention", choices=comparing(), nargs="+", default=default)
    add("--seeds", type=int, nargs="+", default=[0])
    add("--out", type=Path, default=Path("runs/segmentation"))
    add("--classes", type=positive, default=11, help="masks hold numbers below this")
    add("--void", type=int, nargs="*", default=[11], help="numbers of pixels that do not count")
    pixels = dict(type=positive, nargs=2, metavar=("HEIGHT", "WIDTH"))
    add("--size", **pixels, default=[352, 480], help="images are resized to this")
    add("--crop", **pixels, help="training sees crops of this size (default: --size)")
    add(
        "--scale",
        type=at_least_0,
        nargs=2,
        default=[0.5, 2.0],
        help="range of the scale before crops",
    )
    add("--epochs", type=positive, default=50)
    add("--batch", type=positive, default=8)
    add("--optimizer", choices=("sgd", "adamw"), default="sgd")
    add("--lr", type=at_least_0, default=1e-3)
    add("--weight-decay", type=at_least_0, default=0.0)
    add("--drop-path", type=at_least_0, default=0.1, help="stochastic depth, below 1")
    add("--test", action="store_true", help="also score the finished models on the test images")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=positive, help="of the processor")
    args = parser.parse_args()
    args.crop = args.crop or args.size
    if not 0 < args.scale[0] <= args.scale[1]:
        parser.error(f"--scale {args.scale[0]} {args.scale[1]}: give the smaller first, above 0")
    if args.drop_path >= 1:
        parser.error(f"--drop-path {args.drop_path}: give a number below 1")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError):  # torch knows no such device, or has none
        parser.error(f"--device {args.device}: torch has no such device here")
    if args.classes > VOID:
        parser.error(f"--classes {args.classes}: masks have at most {VOID} classes")
    return args


# Images and masks


class Split(NamedTuple):
    """One of train, val and test."""

    images: torch.Tensor  # [N, 3, H, W], uint8, of the size that the model gets
    masks: list[torch.Tensor]  # [height, width] each, uint8, of the size that their files have


def files_of(folder):
    """{name without suffix: path} of the images in a folder, sorted."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: images lie in train, masks in trainannot")
    paths = [path for path in sorted(folder.iterdir()) if is_image(path.name)]
    if not paths:
        raise UserError(f"{folder} holds no image that Pillow reads")
    files = {path.stem: path for path in paths}
    if len(files) < len(paths):
        twice = next(path for path in paths if files[path.stem] != path)
        raise UserError(f"{twice} and {files[twice.stem]} have one name: take one of them out")
    return files


def read_mask(path, classes, void):
    """Class numbers [height, width], uint8, with :data:`VOID` for those in ``void``."""
    with refusing(str(path)), Image.open(path) as image:
        numbers = np.array(image)
    if numbers.ndim != 2:
        raise UserError(f"{path} has colours; a mask has one channel, which holds class numbers")
    numbers = torch.from_numpy(numbers.astype(np.int64))
    ignored = torch.isin(numbers, torch.tensor(void, dtype=torch.int64))
    wrong = numbers[~ignored & ((numbers < 0) | (numbers >= classes))]
    if len(wrong):
        raise UserError(
            f"{path} holds class number {wrong[0]}; --classes {classes} allows 0 to {classes - 1}, "
            f"and --void {' '.join(map(str, void))}"
        )
    return numbers.masked_fill(ignored, VOID).to(torch.uint8)


def read_split(folder, size, classes, void):
    """The :class:`Split` of the images in ``folder`` and the masks of the same names in the folder
    beside it, whose name ends in annot. Raises UserError for files that do not fit."""
    masks_folder = folder.with_name(folder.name + "annot")
    images, masks = files_of(folder), files_of(masks_folder)
    pixels, numbers = [], []
    for name, path in images.items():
        if name not in masks:
            raise UserError(f"{path} has no mask: there is no {masks_folder / name}.png")
        with refusing(str(path)), path.open("rb") as file:
            image = v2.functional.pil_to_tensor(read_rgb(file))
        mask = read_mask(masks[name], classes, void)
        if mask.shape != image.shape[1:]:
            height, width = mask.shape
            raise UserError(
                f"{masks[name]} has {width} x {height} pixels, its image {path} has "
                f"{image.shape[2]} x {image.shape[1]}"
            )
        pixels.append(v2.functional.resize(image, size, antialias=True))
        numbers.append(mask)
    if all((mask == VOID).all() for mask in numbers):
        raise UserError(f"{masks_folder}: no pixel has a class, all are void")
    return Split(torch.stack(pixels), numbers)


def augmentation(args, mean):
    """Segmenter's: another scale, a crop, padded where the image is smaller, and a flip. The
    function takes and returns an image and its mask."""
    fill = {tv_tensors.Image: [round(255 * value) for value in mean], tv_tensors.Mask: VOID}
    crop_and_flip = v2.Compose(
        [v2.RandomCrop(args.crop, pad_if_needed=True, fill=fill), v2.RandomHorizontalFlip()]
    )

    def augment(image, mask):
        scale = torch.empty(()).uniform_(*args.scale).item()
        size = [max(1, round(scale * pixels)) for pixels in args.size]
        image = v2.functional.resize(tv_tensors.Image(image), size, antialias=True)
        return crop_and_flip(image, v2.functional.resize(tv_tensors.Mask(mask), size))

    return augment


class Normalise(nn.Module):
    """Bytes [B, 3, H, W] to what the model was trained on."""

    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", 255 * torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("std", 255 * torch.tensor(std).view(3, 1, 1))

    def forward(self, images):
        return (images - self.mean) / self.std


# The model


def load_encoder(args):
    """A timm ViT without a head, for images of the size of the crops."""
    given = dict(dynamic_img_size=True, num_classes=0, drop_path_rate=args.drop_path)
    folder = Path(args.model.removeprefix("local-dir:")).expanduser()
    if folder.is_dir():
        model = load_folder(folder, f"{' and '.join(STUDENT_FILES)} make a student", given)
    else:
        right = "a timm name with weights or the folder of a student"
        try:
            if args.pretrained or args.download:
                model = load_pretrained(args.model, given, args.download, right)
            else:
                model = create_model(args.model, given)
        except UserError as error:
            raise UserError(f"--model: {error}") from None
    convert(model, "standard")  # which refuses what is not a ViT
    check_sizes(model, args)
    model.set_input_size(tuple(args.crop))
    return model


def check_sizes(model, args):
    for option, size in (("--size", args.size), ("--crop", args.crop)):
        for pixels, patch in zip(size, model.patch_embed.patch_size, strict=True):
            if pixels % patch:
                below = pixels // patch * patch
                near = f"{below} or {below + patch}" if below else f"{patch}"
                raise UserError(
                    f"{option} {size[0]} {size[1]}: {pixels} is not a multiple of the patch size "
                    f"{patch}; {near} is"
                )


def digest(tensors):
    """Of the bytes of tensors, or of a :class:`Split`, as 16 hexadecimal digits."""
    found = hashlib.sha256()
    if isinstance(tensors, Split):
        tensors = (tensors.images, *tensors.masks)
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def tokens_of(encoder, images):
    """The patch tokens [B, T, d] after the last block, normalised, without class and register
    tokens."""
    tokens = encoder.fc_norm(encoder.forward_features(images))
    return tokens[:, encoder.num_prefix_tokens :]


class Segmenter(nn.Module):
    """A ViT with the linear decoder of Segmenter (arXiv 2105.05633, section 3.2)."""

    def __init__(self, encoder, classes):
        super().__init__()
        self.normalise = Normalise(
            *(resolve_model_data_config(encoder)[k] for k in ("mean", "std"))
        )
        self.encoder = encoder
        self.decoder = nn.Linear(encoder.embed_dim, classes)
        nn.init.trunc_normal_(self.decoder.weight, std=0.02)
        nn.init.zeros_(self.decoder.bias)

    def scores(self, images):
        """Logits of the patches [B, classes, rows, columns], of bytes [B, 3, H, W]."""
        logits = self.decoder(tokens_of(self.encoder, self.normalise(images)))  # [B, T, classes]
        rows = images.shape[2] // self.encoder.patch_embed.patch_size[0]
        return logits.transpose(1, 2).unflatten(2, (rows, -1))

    def forward(self, images):
        """Logits of the pixels [B, classes, H, W]."""
        return enlarge(self.scores(images), images.shape[2:])


def enlarge(scores, size):
    return F.interpolate(scores, tuple(size), mode="bilinear", align_corners=False)


@torch.no_grad()
def change_at_start(encoder, converted, images):
    """The largest difference between the patch tokens of two encoders, over the largest number."""
    before, after = (tokens_of(model.eval(), images) for model in (encoder, converted))
    return ((after - before).abs().max() / before.abs().max()).item()


# Training and scores


def confusion(predicted, mask, classes):
    """How many pixels of each class [row] were given each class [column]; void ones left out."""
    seen = mask != VOID
    pairs = mask[seen].long() * classes + predicted[seen]
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def intersection_over_union(counts):
    """The IoU of each class from a confusion matrix; None for a class without pixels."""
    right = counts.diagonal()
    union = counts.sum(0) + counts.sum(1) - right
    present = counts.sum(1) > 0
    return [(r / u).item() if p else None for r, u, p in zip(right, union, present, strict=True)]


def mean_iou(ious):
    return statistics.mean(iou for iou in ious if iou is not None)


@torch.no_grad()
def score(model, split, args):
    """The IoU of each class, over all pixels of a split in the size of their files."""
    model.eval()
    counts = torch.zeros(args.classes, args.classes, dtype=torch.int64)
    masks = iter(split.masks)
    for images in split.images.split(args.batch):
        for scores in model.scores(images.to(args.device)):
            mask = next(masks)
            predicted = enlarge(scores[None], mask.shape)[0].argmax(0)
            counts += confusion(predicted.cpu(), mask, args.classes)
    return intersection_over_union(counts)


def loss_of(model, images, masks):
    """Mean cross-entropy over the pixels that have a class; 0 where none has."""
    sum_ = F.cross_entropy(model(images), masks.long(), ignore_index=VOID, reduction="sum")
    return sum_ / (masks != VOID).sum().clamp(min=1)


def optimizer_of(model, args):
    parameters = [p for p in model.parameters() if p.requires_grad]
    kinds = dict(sgd=(torch.optim.SGD, dict(momentum=0.9)), adamw=(torch.optim.AdamW, {}))
    kind, options = kinds[args.optimizer]
    return kind(parameters, lr=args.lr, weight_decay=args.weight_decay, **options)


def batches(training, args, augment):
    """Images [B, 3, H, W] and masks [B, H, W] of an epoch, in random order."""
    for chosen in torch.randperm(len(training.masks)).split(args.batch):
        pairs = [augment(training.images[i], training.masks[i][None]) for i in chosen.tolist()]
        images, masks = (torch.stack(part) for part in zip(*pairs, strict=True))
        yield images.to(args.device), masks.squeeze(1).to(args.device)


def train_epoch(model, optimizer, batches, rates):
    """The mean loss of the batches; each has a learning rate in the iterator ``rates``."""
    model.train()
    losses = []
    for images, masks in batches:
        for group in optimizer.param_groups:
            group["lr"] = next(rates)
        loss = loss_of(model, images, masks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return statistics.mean(losses)


def train(attention, seed, encoder, args, splits):
    """(segmenter, result) after a fine-tuning of ``encoder``, converted to ``attention``."""
    model, change = segmenter_of(attention, seed, encoder, args, splits["val"])
    model.to(args.device)
    optimizer = optimizer_of(model, args)
    augment = augmentation(args, resolve_model_data_config(encoder)["mean"])
    steps = args.epochs * math.ceil(len(splits["train"].masks) / args.batch)
    rates = (args.lr * (1 - step / steps) ** 0.9 for step in range(steps))
    losses, scores, seconds = [], [], []
    for epoch in range(args.epochs):
        torch.manual_seed(seed * 1_000_003 + epoch)  # the same crops for every attention
        started = time.process_time()
        loss = train_epoch(model, optimizer, batches(splits["train"], args, augment), rates)
        seconds.append(time.process_time() - started)
        if not math.isfinite(loss):
            raise UserError(
                f"{attention}, seed {seed}: the loss is {loss} in epoch {epoch + 1}; take a "
                f"smaller --lr than {args.lr}"
            )
        losses.append(loss)
        scores.append(score(model, splits["val"], args))
        print(
            f"{attention}, seed {seed}, epoch {epoch + 1}: training loss {loss:.4f}, "
            f"mean IoU {100 * mean_iou(scores[-1]):.2f} %",
            flush=True,
        )
    return model, dict(
        attention=attention,
        seed=seed,
        parameters=sum(p.numel() for p in model.parameters()),
        change_at_start=change,
        training_loss=losses,  # of each epoch
        mean_iou=[mean_iou(ious) for ious in scores],  # of the validation images after each epoch
        iou=scores[-1],  # of each class
        seconds_per_epoch=statistics.median(seconds),
    )


def segmenter_of(attention, seed, encoder, args, validation):
    """(segmenter, how much the conversion of ``encoder`` to ``attention`` changed its outputs)."""
    converted = convert(encoder, attention, **OPTIONS.get(attention, {}))
    torch.manual_seed(seed)  # the same decoder for every attention
    model = Segmenter(converted, args.classes)
    some = model.normalise(validation.images[:4])
    return model, change_at_start(encoder, converted, some)


def settings_of(args, weights, data):
    """What a result depends on."""
    named = "classes void size crop scale epochs batch optimizer lr weight_decay drop_path"
    return {name: getattr(args, name) for name in named.split()} | dict(weights=weights, data=data)


def cell(attention, seed, args, splits):
    """The result of one training, from its file if there is one."""
    torch.manual_seed(seed)  # for a model without trained weights
    encoder = load_encoder(args)
    data = digest(splits["train"]) + digest(splits["val"])
    settings = settings_of(args, digest(encoder.state_dict().values()), data)
    weights = args.out / f"{attention}-{seed}.safetensors"

    def fine_tune():
        model, result = train(attention, seed, encoder, args, splits)
        save_file(model.state_dict(), weights)
        return result

    def test():
        model, _change = segmenter_of(attention, seed, encoder, args, splits["val"])
        try:
            model.load_state_dict(load_file(weights))
        except Exception as error:  # whatever a damaged file makes of safetensors
            raise UserError(
                f"{weights}: {error}; remove {weights.stem}.json to train again"
            ) from None
        ious = score(model.to(args.device), splits["test"], args)
        return dict(test_iou=ious, test_mean_iou=mean_iou(ious))

    result = kept(weights.with_suffix(".json"), settings, fine_tune)
    if args.test:
        settings["test"] = digest(splits["test"])
        result |= kept(args.out / f"{weights.stem}-test.json", settings, test)
    return result


def table(results, tested):
    """Markdown. IoU in per cent. The difference is to standard attention with the same seed."""
    kinds = {"validation mean IoU": lambda run: 100 * run["mean_iou"][-1]}
    if tested:
        kinds["test mean IoU"] = lambda run: 100 * run["test_mean_iou"]
    columns = [name for kind in kinds for name in (kind, "difference")]
    print("| attention | parameters | change at the start | training loss | after one epoch "
          f"| {' | '.join(columns)} | s / epoch |")  # fmt: skip
    print("|---" * (6 + len(columns)) + "|")
    standard = {run["seed"]: run for run in results.get("standard", [])}
    for name, runs in results.items():
        cells = []
        for value in kinds.values():
            pairs = [(run, standard[run["seed"]]) for run in runs if run["seed"] in standard]
            differences = [value(run) - value(other) for run, other in pairs if name != "standard"]
            cells += [mean_and_spread([value(run) for run in runs], 2)]
            cells += [mean_and_spread(differences, 2)]
        print(
            f"| {name} | {runs[0]['parameters']:,} | {runs[0]['change_at_start']:.1g} "
            f"| {mean_and_spread([run['training_loss'][-1] for run in runs])} "
            f"| {mean_and_spread([100 * run['mean_iou'][0] for run in runs], 2)} "
            f"| {' | '.join(cells)} "
            f"| {statistics.median(run['seconds_per_epoch'] for run in runs):.1f} |"
        )


@in_one_line()
def main():
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    load_encoder(args)  # before the images: what is wrong here is found at once
    splits = {
        name: read_split(args.data / name, args.size, args.classes, args.void)
        for name in ("train", "val", *(["test"] if args.test else []))
    }
    args.out.mkdir(parents=True, exist_ok=True)
    results = {name: [] for name in args.attention}
    for seed in args.seeds:
        for name in results:
            results[name].append(cell(name, seed, args, splits))
    write_json(args.out / "table.json", results)
    table(results, args.test)


if __name__ == "__main__":
    main()
