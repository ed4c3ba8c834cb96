"""What is chosen for images that nobody has written settings for, in tables: by the size of the
images, their number, the GPU and the teacher. choices.py takes the rows that fit, unless the user
gave a setting, and computes what follows from them, such as epochs. The measurements are those of
docs/your-own-images.md and docs/results, and the files that are named lie in docs/results/data;
nothing was measured on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

Preset = dict[str, tuple[Any, str]]
"""For settings "a.b" the value, and the reason that the user is told; without one nothing is
said."""

# ---- the size of images: (fewest pixels of the shorter side, image_size, patch_size); None is the
# size of the images themselves
SIZES = ((48, 64, 8), (24, None, 4), (0, None, 2))
GPU_SIZES = ((128, 128, 8), *SIZES)

# ---- the ViT from the start: (embed_dim, depth, images that teacher and student see in all epochs)
MODEL = (64, 2, 132_000)
GPU_MODEL = (192, 9, 600_000)
STEM = "residual"
"""With it two blocks end as high as four, and above four blocks behind the conv stem
(unlabelled.json, local.json)."""

# ---- the number of images
BATCHES = ((1_000, 32), (10_000, 64), (math.inf, 128))
"""(fewer training images than, batch_size)"""
FEWEST_EPOCHS = 12
MOST_EPOCHS = 90
FEWEST_EPOCHS_OF_MANY = 10
SEEN_OF_MANY = 690_000
"""Images that a student sees in all its epochs where most have no labels: 30 epochs of 23,000
images of CIFAR-10. A third of them taught it less there (unlabelled.json) and on waste photos
(judge_unlabelled.json)."""
BATCH_OF_MANY = 64
"""Its batches there; larger ones were not tried."""
FEW_IMAGES = 10_000
"""Training images below which a pretrained ViT is offered before one from the start."""
RANDAUGMENT_IMAGES = 1_000
"""Training images below which RandAugment gains: 5.4 points with 600 of CIFAR-10, nothing with
3,000 (few.json, labels.json)."""

# ---- the optimizer
MUON_RATE = 4e-3
OTHER_RATE = 1e-3
"""Of optimizers that nothing was measured with."""
RESNET_RATE = 0.016
FINE_TUNING_EPOCHS = 10
PRETRAINED = "deit_tiny_patch16_224.fb_in1k"
"""The weights that are offered."""
OPTIMIZER_OF_FINE_TUNING: Preset = {
    "name": ("adamw", "the optimizer"),
    "lr": (2e-4, "the learning rate, lower than from the start"),
    "args.layer_decay": (0.75, "each block has this share of the next one's learning rate"),
}
"""Below train.optim or phase_a.optim."""

# ---- the teacher
LOCAL: Preset = {
    "phase_a.teacher": (
        "local",
        "a locality loss: at first each patch's attention is pulled to its neighbours",
    ),
}
"""Where the user names no other (local.json, few.json)."""
LOCAL_STDS = {1: [1.5], 2: [0.8, 2.0]}
"""By the number of heads."""
STDS_OF_MORE_HEADS = [0.7, 1.5, 3.0]

MAPS: Preset = {"phase_b.alpha": (0.0, ""), "phase_b.beta": (1.0, "")}
"""Maps of any teacher, beside labels."""
# gamma, and the share of the epochs that have it, of stored maps and of those of local
STORED_MAPS = (0.3, 1 / 3)
LOCAL_MAPS = (0.25, 2 / 5)
HEADS = "each head learns from the mean of the teacher's"
MOST_VIEWS = 12
"""Views of each image whose maps a trained teacher shows: each costs it a forward pass."""
MOST_BYTES = 2e9
"""Of all stored views."""

PREDICTIONS: Preset = {
    "phase_b.gamma": (0.0, "no attention maps, which added little to predictions"),
    "export.kind": ("predictions", "of each image as it is, 2 bytes for each class"),
}
"""Of a teacher of images without labels (unlabelled.json), of a trained one of labelled images
(judge_unlabelled.json, given-teacher.json), or of one without maps."""
SHARE_OF_LABELS = 0.3
"""In the loss, beside predictions of the labelled images alone (given-teacher.json)."""
RESNET: Preset = {
    "phase_a.teacher": (
        "resnet",
        "a narrow ResNet that learns from the labels; a pretrained model's name is better",
    ),
}
SMALLEST_SHARE = 0.05
"""Of the labels in the loss, where most images have none."""

PAPERS: Preset = {
    "phase_a.teacher": ("gaussian", "Gaussians of each image, as in the paper; 'run' takes local"),
}
PAPERS_TEACHER: Preset = {
    "phase_a.stop_accuracy": (0.92, "the training accuracy at which it stops"),
    "phase_a.mode": ("stochastic", "one sampled point for each query"),
    "phase_a.parametrisation": ("paper", ""),
    "phase_a.augment": (False, ""),
    "phase_a.per_image": ("embedding", "a vector for each image, which is decoded"),
}
"""Phase A as in the GauTransformer paper, for whoever asks for it."""
PAPERS_ROWS: Preset = {"phase_a.rows.lr": (0.02, ""), "phase_a.rows.initial_std": (1.0, "")}
"""The paper does not say them; embeddings start with std 1, so that images differ at once."""
COMPRESSION = ((256, 32, 128), (2_000, 128, 512), (math.inf, 256, 768))
"""(fewer Gaussians in a block than, embedding, hidden): configs/digits.yaml has 64 of an image in a
block, the paper's ImageNet 2,352."""
PAPERS_LOSSES: Preset = {
    "phase_b.alpha": (0.2, "the weight of the teacher's predictions"),
    "phase_b.beta": (0.1, "the weight of the labels"),
    "phase_b.gamma": (0.7, "the weight of the teacher's attention maps"),
    "phase_b.gamma_schedule": ("constant", "these maps are compared in all epochs"),
    "phase_b.divergence": ("student_teacher", ""),
}
