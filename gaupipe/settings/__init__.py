"""Typed settings: one pydantic model a section, YAML files, ``--set a.b=c``, unknown keys
refused with a suggestion."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from gaupipe.attention import STUDENTS
from gaupipe.settings import older_names
from gaupipe.settings.augment import AugmentSettings
from gaupipe.settings.sections import Count, Decay, Fraction, Positive, Rate, Section, Weight
from gaupipe.system.errors import UserError

if TYPE_CHECKING:
    StudentKey = str  # a checker does not run what lists the attentions
else:
    StudentKey = Literal[STUDENTS]
StoreKind = Literal["gaussian", "embedding", "dense", "prior", "topk", "mixture"]

IRRELEVANT = (
    "device",
    "threads",
    "checkpoint_minutes",
    "checkpoint_steps",
    "key_snapshots",
    "geometry_every",
    "log.to",
    "log.every",
    "log.project",
    "data.workers",
    "data.cache",
    "data.eval_batch_size",
    "data.root",
    "data.download",
    "phase_a.download",
)
"""Settings that do not make another run of it: they may differ when one is continued."""

FILE_IMAGE_SIZE = 224
"""Pixels of images in files where ``data.image_size`` is null."""

IN_PHASE_B = (
    "augment.",
    "phase_b.",
    "baseline.",
    "seed",
    "precision",
    "compile",
    "data.batch_size",
    "data.buckets",
    "model.init",
    "model.init_std",
    "model.pos_embed_std",
    *IRRELEVANT,
)
"""Settings that students of one teacher may differ in; a name that ends in a dot stands for its
section."""


MODEL_ARGS_ELSEWHERE = {
    **dict.fromkeys(
        ("img_size", "in_chans", "num_classes"), "the data set says it (see data.image_size)"
    ),
    **dict.fromkeys(
        ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"),
        "no setting loads trained weights",
    ),
    **dict.fromkeys(("device", "dtype"), "see the settings device and precision"),
    "attention": "see phase_b.student",
    "attn_layer": "see phase_b.student",
    **{name: f"see phase_b.{name}" for name in ("attention_options", "match_params", "rezero")},
    **dict.fromkeys(
        ("features_only", "out_indices", "scriptable", "exportable", "no_jit", "dynamic_img_size"),
        "gaupipe needs the whole model at one image size",
    ),
    "dynamic_img_pad": "images have whole patches (see data.image_size)",
    "patch_drop_rate": "every token needs its place on the grid",
}
"""Keywords of timm.create_model that are not for ``model.args``, and what to do instead."""

MAX_SIZE = {"depth": 1000, "num_heads": 1000, "embed_dim": 100_000, "patch_size": 10_000}


def _is_whole(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most


def _is_number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


YES_OR_NO = {
    *("qkv_bias", "qk_norm", "scale_attn_norm", "scale_mlp_norm", "proj_bias", "class_token"),
    *("no_embed_class", "pre_norm", "final_norm", "fc_norm", "fix_init"),
}
"""Keywords of timm's VisionTransformer that are true or false (``fc_norm`` may be null)."""


def _keywords(args: dict[str, Any]) -> dict[str, Any]:
    """YAML reads ``{a:1}`` as one key without a value, which timm would leave out silently."""
    for name in args:
        if not name.isidentifier():
            hint = ": write {name: value}, with a space" if ":" in name else ""
            raise ValueError(f"{name!r} is no keyword{hint}")
    return args


def _usable_model_args(args: dict[str, Any]) -> dict[str, Any]:
    for name, value in args.items():
        if name in MODEL_ARGS_ELSEWHERE:
            raise ValueError(f"{name!r} cannot be given here: {MODEL_ARGS_ELSEWHERE[name]}")
        sizes = value if name == "patch_size" and isinstance(value, list | tuple) else [value]
        if name in MAX_SIZE and not all(_is_whole(size, MAX_SIZE[name]) for size in sizes):
            raise ValueError(f"{name} should be a whole number from 1 to {MAX_SIZE[name]}")
        if name.endswith(("drop_rate", "drop_path_rate")) and not _is_number(value, 0, 1):
            raise ValueError(f"{name} should be a number from 0 to 1")
        if name in YES_OR_NO and not isinstance(value, bool | None):
            raise ValueError(f"{name} should be true or false")
        if name == "mlp_ratio" and not _is_number(value, 0, 1000):
            raise ValueError("mlp_ratio should be a number from 0 (no FFN) to 1000")
    return args


Keywords = Annotated[dict[str, Any], AfterValidator(_keywords)]
ModelArgs = Annotated[Keywords, AfterValidator(_usable_model_args)]


def _number_of_workers(value: Any) -> Any:
    if value != "auto" and (isinstance(value, bool) or value not in range(1025)):
        raise ValueError("should be auto or a whole number from 0 to 1024")
    return value


Workers = Annotated[int | Literal["auto"], BeforeValidator(_number_of_workers)]


class DataSettings(Section):
    """The data set, and how its images become tensors."""

    name: str = "digits"
    """``digits``, ``fashion_mnist``, ``folder``, or ``torch/NAME`` or ``hfds/NAME`` of timm's
    ``create_dataset``."""
    root: Path | None = None
    """Folder of the files. With null, ``fashion_mnist`` takes the folder that the environment
    variable GAUPIPE_FASHION_MNIST names, or else the folder of Debian's package."""
    download: bool = False
    """Let torchvision fetch a data set that is not on this machine."""
    train_images: Positive | None = None
    """Use only this many training images, the same number of each class as far as possible; null
    takes all."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the training images held out, class by class, for validation (``digits`` always
    holds out 20 %)."""
    image_size: Positive | None = None
    """Height and width of the images that the model gets, in pixels: a multiple of the patch size.
    Null keeps the size of images held in memory. Images in files then get 224 pixels."""
    batch_size: Positive = 128
    """Training images in a step."""
    eval_batch_size: Positive = 512
    """Images in a batch where nothing is trained: validation, export, evaluation."""
    workers: Workers = "auto"
    """Processes that decode images, 0 to 1024; with 0 the process that trains decodes. ``auto`` is
    0 for images held in memory or in the cache, and for few images; else it is chosen by the
    processor cores, and is larger with a GPU."""
    cache: Literal["auto", "none"] = "auto"
    """``auto`` keeps the decoded images of image files in the user's cache (GAUPIPE_CACHE), also
    for later commands, where they take less than 20 GB and less than half of the free disk.
    ``none`` decodes in every epoch."""
    buckets: Positive | None = None
    """Groups of training images that several processes share (see docs/distributed.md). The number
    of processes must divide it, and may change when a run is continued. Null is the number of
    processes that the run starts with."""

    @property
    def num_buckets(self) -> int:
        """``buckets`` of a run that has started: null is then a single process."""
        return self.buckets or 1


class ModelSettings(Section):
    """The ViT of the student and of a teacher that phase A trains. The student's size can be
    changed with ``phase_b.model_args``. With ``phase_a.teacher: gaussian`` the teacher has
    GauAttention, with ``phase_a.teacher: vit`` standard attention."""

    name: str = "gauvit_pico_patch2_8"
    """Name of the ViT in timm: ``gauvit_pico_patch2_8``, ``gauvit_atto_patch4_32`` or
    ``gauvit_tiny_patch16_224``."""
    args: ModelArgs = {}
    """Keywords for timm's VisionTransformer that change the preset, e.g. ``{embed_dim: 96,
    depth: 6}``."""
    init_std: Rate | None = None
    """Standard deviation of the initialisation of every linear layer; null keeps timm's 0.02."""
    init: Literal["normal", "mimetic"] = "normal"
    """``mimetic`` gives the attention initial weights that look like trained ones (arXiv
    2305.09828). It also makes the position embedding sinusoidal, unless ``pos_embed_std`` is
    set."""
    pos_embed_std: Rate | None = None
    """Standard deviation of the initialisation of the position embedding; null keeps timm's
    0.02."""


class OptimSettings(Section):
    """The optimizer of the network's weights and the schedule of its learning rate, by timm's names
    (``create_optimizer_v2``, ``create_scheduler_v2``)."""

    name: str = "adamw"
    """Name of the optimizer in timm, such as ``adamw``, ``sgd`` or ``lamb``."""
    lr: Rate = 1e-3
    """Learning rate after the warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of Adam's first and second moment."""
    weight_decay: Weight = 0.03
    """Weight decay of the network's weights; biases, norms and the position embedding have none."""
    schedule: str = "cosine"
    """The schedule after the warm-up: ``cosine``, ``constant``, ``poly``, ``step``, ``multistep``,
    ``tanh``, ``wsd`` or ``rsqrt``."""
    schedule_args: Keywords = {}
    """Further keywords of ``create_scheduler_v2``, with times in epochs, e.g. ``{decay_epochs: 30,
    decay_rate: 0.1}``. ``num_epochs`` is the length of one cycle. By default one cycle takes all
    epochs after the warm-up. ``{num_epochs: 3, cycle_limit: 2, cycle_mul: 2}`` restarts the
    schedule after 3 epochs."""
    warmup_epochs: Count = 1
    """Epochs of linear warm-up; they count among the epochs of the phase."""
    min_lr: Weight = 1e-5
    """Learning rate at the start of the warm-up and at the end of the schedule."""
    clip_grad: Rate | None = 1.0
    """Largest norm of the gradient, to which larger gradients are clipped; null does not clip."""
    accumulate: Positive = 1
    """Batches whose gradients are added up before a step."""
    ema: Fraction | None = None
    """Decay of an exponential moving average of the weights. If set, the averaged weights are
    evaluated and saved. Null makes no average."""


class RowSettings(Section):
    """The per-image parameters (raw numbers of the Gaussians, or embeddings), and the Adam
    optimizer that updates them image by image."""

    lr: Rate = 0.1
    """Learning rate of Adam for the per-image parameters, which are updated once an epoch."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of Adam's first and second moment."""
    eps: Rate = 1e-8
    """Added to the root of Adam's second moment."""
    initial_std: Weight = 0.0
    """Standard deviation of the initialisation of the per-image parameters; with 0 all images start
    alike."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Format of Adam's moments. With bfloat16, parameters and moments take a third less space;
    bfloat16 suits about a hundred epochs at most."""
    memory_budget_gb: Weight = 2.0
    """If the per-image parameters and their moments take more than this many GB, all of them lie in
    files in the run directory; 0 always uses files."""


class CompressionSettings(Section):
    """The compression network of ``phase_a.per_image: embedding``: an embedding for each image and
    block, from which a decoder computes the raw numbers of the image's Gaussians."""

    embedding: Annotated[int, Field(gt=0, le=65536)] = 256
    """Numbers in an embedding."""
    hidden: Annotated[int, Field(gt=0, le=65536)] = 768
    """Width of the decoder's hidden layer."""


class PhaseASettings(Section):
    """Phase A: the teacher, whose attention maps the student learns from. Only ``teacher``,
    ``teacher_args``, ``download``, ``max_epochs``, ``stop_accuracy``, ``label_smoothing``,
    ``augment`` and ``optim`` concern a teacher that is a trained ViT."""

    teacher: str = "gaussian"
    """``gaussian`` trains a ViT with Gaussian attention, ``vit`` an ordinary ViT.
    ``local-dir:FOLDER`` takes a trained ViT from a folder that timm reads. A timm name such as
    ``deit_tiny_patch16_224.fb_in1k`` takes a ViT with published weights."""
    teacher_args: Keywords = {}
    """Keywords for a teacher that is a trained ViT. With ``vit`` they change ``model.args``. For
    any other teacher they go to ``timm.create_model``, e.g. ``{img_size: 32}``."""
    download: bool = False
    """Let timm fetch published weights that are not on this machine."""
    mode: Literal["stochastic", "expected"] = "expected"
    """``stochastic`` samples one point for each query, as the GauTransformer paper does;
    ``expected`` uses the exact mean over the query's Gaussian."""
    parametrisation: Literal["loc_scale", "paper"] = "loc_scale"
    """``loc_scale`` learns means and logarithms of the standard deviations of a Gaussian; ``paper``
    learns the eight numbers of *GauTransformer, eq. 5*."""
    prior: bool = True
    """Learn a shared prior: one Gaussian for each block, head and query, which all images share."""
    per_image: Literal["table", "embedding", "predicted", "none"] = "table"
    """What makes the Gaussians of an image differ from the shared prior. ``table`` learns raw
    numbers for each training image. ``embedding`` learns an embedding for each training image and
    block, and a decoder that turns it into raw numbers. With ``predicted`` each token predicts the
    raw numbers of its own Gaussians by a learned linear map, so that unseen and augmented images
    have Gaussians too. With ``none`` all images have the Gaussians of the shared prior. The older
    names ``residual: false`` (for ``none``), ``residual: true`` and ``compression`` (for
    ``embedding``) are still read."""
    compression: CompressionSettings | None = None
    """Sizes of the embeddings and of their decoder, for ``per_image: embedding``. Null takes the
    defaults."""
    prior_lr: Rate = 2e-2
    """Learning rate of the shared prior, which the network's optimizer updates at every step.
    Per-image parameters have the learning rate ``rows.lr``."""
    max_epochs: Positive = 12
    """Largest number of epochs of phase A."""
    stop_accuracy: Fraction = 0.92
    """Phase A stops after the first epoch with a training accuracy of at least this."""
    upper_accuracy: Fraction = 0.98
    """Above this training accuracy the run prints a warning: the teacher has overfitted."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Smoothing of the labels while a teacher ``vit`` is trained."""
    label_passes: Positive = 8
    """In the mode ``stochastic`` the teacher's predictions are the mean over this many forward
    passes, each with newly sampled points."""
    augment: bool = False
    """Whether phase A augments the training images too, as the section ``augment`` says."""
    optim: OptimSettings = OptimSettings()
    rows: RowSettings = RowSettings()

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, given: Any) -> Any:
        if isinstance(given, dict):
            given = dict(given)
            older_names.settle(given)
            if given.get("per_image") == "embedding" and given.get("compression") is None:
                given["compression"] = {}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> PhaseASettings:
        if not self.learns_gaussians:
            return self._without_gaussians()
        if self.teacher_args:
            raise ValueError("teacher_args are for a teacher that is a ViT: see model.args")
        if not self.prior and self.per_image == "none":
            raise ValueError(
                "prior is false and per_image none: nothing is left to learn where to look"
            )
        if self.predicts_gaussians and self.mode != "expected":
            raise ValueError(
                "per_image: predicted needs mode: expected: with sampled points every pass would "
                "predict other Gaussians in later blocks"
            )
        return self

    def _without_gaussians(self) -> PhaseASettings:
        if self.teacher == "vit":
            _usable_model_args(self.teacher_args)
        elif "pretrained" in self.teacher_args:
            raise ValueError("teacher_args: a teacher always has its trained weights")
        if self.per_image in ("embedding", "predicted"):
            raise ValueError(
                f"per_image: a teacher {self.teacher!r} has no Gaussians, and none that are "
                f"{self.per_image}"
            )
        return self

    @property
    def learns_gaussians(self) -> bool:
        """Whether the teacher is a ViT with Gaussian attention, not a trained ViT."""
        return self.teacher == "gaussian"

    @property
    def learns_of_images(self) -> bool:
        """Whether the teacher has parameters of single images."""
        return self.learns_gaussians and self.per_image in ("table", "embedding")

    @property
    def predicts_gaussians(self) -> bool:
        """Whether the teacher predicts the Gaussians of an image from its tokens."""
        return self.learns_gaussians and self.per_image == "predicted"

    @property
    def shares_prior(self) -> bool:
        """Whether the teacher has Gaussians that all images share."""
        return self.learns_gaussians and self.prior


class ExportSettings(Section):
    """The attention-map store: what it holds of the maps, and in which format."""

    kind: StoreKind | None = None
    """What is stored for each query. Null is ``gaussian`` for a teacher with per-image parameters,
    ``prior`` for a teacher with the shared prior alone, and ``topk`` for a trained ViT."""
    encoding: Literal["float16", "uint8"] | None = None
    """``uint8`` stores numbers in 8 bits, in the kinds ``gaussian``, ``topk`` and ``dense``. Null
    is ``uint8`` for ``topk``, and ``float16`` for the other kinds."""
    k: Annotated[int, Field(gt=0, le=255)] | None = None
    """Number of keys that ``topk`` stores for each query (null: 8), or of Gaussians that
    ``mixture`` fits to each query's attention (null: 2)."""
    views: Annotated[int, Field(gt=1, le=10_000)] | None = None
    """Number of augmented views of each image whose maps are stored. The views are drawn as
    the section ``augment`` says, and phase B trains on the same views. Null stores the maps of the
    images themselves."""


class PhaseBSettings(Section):
    """Phase B: the student, an ordinary ViT, learns from the labels, the teacher's predictions and
    the stored maps."""

    student: StudentKey = "standard"
    """The student's attention."""
    attention_options: Keywords = {}
    """Keywords of the student's attention class, e.g. ``{zz: false}`` for belief2."""
    match_params: bool = False
    """Make the FFN smaller, so that the student has as many parameters as with standard
    attention."""
    rezero: bool = False
    """Blocks without normalisation; each branch is multiplied by a learned scalar whose initial
    value is 0."""
    epochs: Positive = 12
    """Epochs of the student; also of the baseline, unless ``baseline.epochs`` is set."""
    keep: Literal["last", "best"] = "last"
    """Which epoch the folder ``student`` is of: the last, or the best one by ``best_by``. The
    other one lies beside it. May be changed when a student is continued, also a finished one."""
    best_by: Literal["val_acc", "val_loss"] = "val_acc"
    """What the best epoch is the best in: accuracy or cross-entropy on the validation images."""
    patience: Positive | None = None
    """Early stopping: training ends when this many epochs in a row were no better, by ``best_by``,
    than the best before them. Null trains all epochs."""
    alpha: Weight = 0.2
    """Weight of L_soft, the cross-entropy with the teacher's predictions."""
    beta: Weight = 0.1
    """Weight of L_hard, the cross-entropy with the labels."""
    gamma: Weight = 0.7
    """Weight of L_feat, the divergence from the stored attention maps, at the start of the
    schedule."""
    gamma_schedule: Literal["constant", "linear", "cosine", "stop_after"] = "constant"
    """``linear`` and ``cosine`` lower gamma to 0 over ``gamma_epochs``; ``stop_after`` switches
    gamma off after ``gamma_epochs``; ``constant`` never changes gamma, as in the GauTransformer
    paper."""
    gamma_epochs: Positive | None = None
    """Epochs until gamma is 0; null means all epochs."""
    feature_queries: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the queries that L_feat compares. Below 1 every image has its own random part in
    every epoch, the same in all blocks and heads. The expectation of L_feat stays the mean over all
    queries, and a step takes less time and memory."""
    model_args: ModelArgs = {}
    """Keywords in which the student differs from ``model.args``, e.g. ``{depth: 6}``."""
    layer_map: list[Count | None] | None = None
    """For each block of the student the number of the stored block that it is compared with,
    counted from 0, or null for no comparison. Without a list each block is compared with the stored
    block of the same number. If the numbers of blocks differ, evenly spaced stored blocks are
    taken."""
    layer_weights: list[Weight] | None = None
    """Weight of each block of the student in L_feat; null weighs all blocks alike."""
    mean_heads: bool = False
    """Compare each head with the mean over the teacher's heads. The student may then have another
    number of heads than the teacher."""
    head_map: list[Count] | None = None
    """For each head of the student the number of the stored head that it is compared with, counted
    from 0; null compares each head with the stored head of the same number."""
    copy_epochs: Count = 0
    """Attention copy: number of epochs, from the first on, in which the student attends with the
    stored maps in place of its own."""
    shuffle_maps: bool = False
    """A control: every image gets the maps of another image. The control shows whether it matters
    that the maps belong to the image."""
    average_maps: bool = False
    """A control: every image gets the mean of all stored maps. The control shows whether maps help
    that are the same for all images."""
    match_grid: bool = False
    """Allow a student with another token grid than the teacher's: the stored maps are then
    converted to the student's grid."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Smoothing of the labels in L_hard."""
    warm_start: Literal["none", "teacher", "prior", "exact"] = "none"
    """``teacher`` copies the teacher's patch and position embedding, V, output projection, FFN,
    norms and head. If the teacher is a trained ViT, ``teacher`` also copies Q and K. A student that
    has Gaussians itself gets the teacher's. ``prior`` is for ``phase_a.teacher: gaussian``: it
    copies the same weights as ``teacher``, and fits Q and K to the attention of the shared prior,
    or to the maps that the teacher predicts. ``exact`` is for ``phase_a.per_image: none`` and
    students with ``attention_options: {prior: true}``: the prior goes into the scores and Q is 0,
    so that the student computes what the teacher does before its first step."""
    temperature: Rate = 1.0
    """The attention maps p of teacher and student become softmax(log p / temperature) before they
    are compared."""
    direction: Literal["teacher_student", "student_teacher"] = "teacher_student"
    """``teacher_student`` is KL(teacher || student), which makes the student attend wherever the
    teacher does. ``student_teacher`` is KL(student || teacher), the order of *GauTransformer,
    eq. 9*."""
    preload_gb: Weight = 2.0
    """Phase B reads the whole store into memory if the stored numbers fit into this many GB."""
    optim: OptimSettings = OptimSettings()

    @model_validator(mode="after")
    def _consistent(self) -> PhaseBSettings:
        if self.alpha + self.beta + self.gamma == 0:
            raise ValueError("alpha, beta and gamma are all 0: nothing is left to learn from")
        if self.mean_heads and self.head_map is not None:
            raise ValueError("mean_heads and head_map: choose one")
        if self.shuffle_maps and self.average_maps:
            raise ValueError("shuffle_maps and average_maps: choose one")
        return self


class BaselineSettings(Section):
    """The baseline: the student's ViT, trained on the labels alone."""

    enabled: bool = True
    """Whether ``gaupipe run`` trains the baseline too."""
    optim: OptimSettings | None = None
    """Optimizer and schedule of the baseline; null takes ``phase_b.optim``."""
    epochs: Positive | None = None
    """Epochs of the baseline; null takes ``phase_b.epochs``. For a comparison in which phase A
    counts, give the epochs of both phases together."""


class LogSettings(Section):
    """What can be watched of a training while it runs, beside the metrics of its epochs."""

    to: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """Where losses and metrics are shown: any of ``tensorboard``, ``wandb`` (Weights & Biases) and
    ``trackio``, each of which is an extra of the same name."""
    every: Count = 50
    """Steps (batches) between two lines of steps.jsonl, which the loggers of ``to`` get too; 0
    writes none."""
    project: str = "gaupipe"
    """Name of the project in Weights & Biases and trackio."""


class Settings(Section):
    """Everything that determines a run."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of all random numbers of the run."""
    device: str = "auto"
    """``auto`` takes a GPU where there is one. Any other value is the name of a torch device, such
    as ``cpu`` or ``cuda:1``."""
    threads: Annotated[int, Field(gt=0, le=1024)] | None = None
    """Processor threads for torch; null leaves torch's choice."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the forward pass. ``bfloat16`` and ``float16`` are mixed precision: Gaussians,
    coordinates and losses stay float32."""
    compile: bool = False
    """Compile the forward pass with torch.compile."""
    checkpoint_minutes: Weight | None = 10.0
    """Minutes after which a training writes a checkpoint in the middle of an epoch; 0 writes one
    after every step of the optimizer. Null writes checkpoints between epochs alone."""
    checkpoint_steps: Positive | None = None
    """Steps of the optimizer after which a training writes a checkpoint in the middle of an epoch,
    also before ``checkpoint_minutes`` have passed; null counts no steps."""
    key_snapshots: Count = 0
    """Number of training images for which gaupipe saves the average attention of each key after
    every epoch of both phases."""
    geometry_every: Count = 0
    """Number of steps (batches) after which gaupipe measures what the attention of each block does
    to the tokens of a student: norms and angles in metrics.jsonl, and a figure. 0 means never."""
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    augment: AugmentSettings = AugmentSettings()
    phase_a: PhaseASettings = PhaseASettings()
    export: ExportSettings = ExportSettings()
    log: LogSettings = LogSettings()
    phase_b: PhaseBSettings = PhaseBSettings()
    baseline: BaselineSettings = BaselineSettings()

    @property
    def phase_a_augment(self) -> AugmentSettings:
        """The augmentation of phase A. Where a teacher learns Gaussians, no images are mixed: it
        learns where to look in single images."""
        if not self.phase_a.augment:
            return AugmentSettings()
        if not self.phase_a.learns_gaussians:
            return self.augment
        return self.augment.model_copy(update={"mixup": 0.0, "cutmix": 0.0})

    @property
    def baseline_optim(self) -> OptimSettings:
        """The optimizer of the plain ViT: that of phase B, if it has none of its own."""
        return self.baseline.optim or self.phase_b.optim

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if self.phase_b.warm_start == "prior" and not self.phase_a.shares_prior:
            raise ValueError(
                "phase_b.warm_start=prior needs phase_a.teacher=gaussian and phase_a.prior=true"
            )
        if self.phase_b.warm_start == "prior" and self.phase_b.student == "gaussian":
            raise ValueError(
                "phase_b.warm_start=prior fits Q and K, which the student gaussian does not have: "
                "take phase_b.warm_start=teacher, which copies the Gaussians"
            )
        if self.phase_b.warm_start == "exact":
            self._check_exact()
        return self

    def _check_exact(self) -> None:
        """A student that is to be its teacher needs one that it can be."""
        teacher, phase = self.phase_a, self.phase_b
        needed = {
            "phase_a.teacher=gaussian": teacher.learns_gaussians,
            "phase_a.per_image=none": teacher.per_image == "none",
            "phase_a.mode=expected": teacher.mode == "expected",
            "phase_b.student=standard": phase.student == "standard",
            "phase_b.attention_options={prior: true}": phase.attention_options.get("prior") is True,
            "phase_b.rezero=false": not phase.rezero,
            "phase_b.match_params=false": not phase.match_params,
            "phase_b.model_args={} but for drop rates": all(
                name.endswith("_rate") for name in phase.model_args
            ),
        }
        missing = [name for name, there in needed.items() if not there]
        if missing:
            raise ValueError(f"phase_b.warm_start=exact needs {missing[0]}")


def load(source: str | Path, overrides: Sequence[str] = ()) -> Settings:
    """Reads settings from a YAML file, or from a configuration shipped with gaupipe when given its
    bare name.

    ``overrides`` are ``a.b=value`` strings, the value in YAML. Raises UserError with one line for
    whatever is wrong.
    """
    tree = read_yaml(source)
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise UserError(
            f"{source}: should hold settings such as 'seed: 0', found {type(tree).__name__}"
        )
    return parse(with_overrides(tree, overrides), str(source))


def with_overrides(tree: dict, overrides: Sequence[str]) -> dict:
    """A nested dict of settings, in which each ``a.b=value`` is set, the value in YAML. Raises
    UserError for one that is no such setting, and for two that contradict each other."""
    asked: dict = {}
    for override in overrides:
        _apply(asked, override, settled=False)
    _settle(asked, "--set")  # the words of one command agree; those of a file they overrule
    for override in overrides:
        _apply(tree, override)
    return tree


def _settle(tree: dict, where: str) -> None:
    """Brings older names of a tree of settings up to date. Raises UserError, naming ``where``."""
    phase = tree.get("phase_a")
    if not isinstance(phase, dict):
        return
    try:
        older_names.settle(phase)
    except UserError as error:
        raise UserError(f"{where}: phase_a: {error}") from None


def parse(tree: dict, where: str) -> Settings:
    """Validates a nested dict of settings; ``where`` names it in messages. Raises UserError."""
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{where}: {_first_problem(error)}") from None


def dump(settings: Settings) -> str:
    """The resolved settings as YAML; ``load`` of it gives the same settings."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def flatten(settings: Settings) -> dict[str, Any]:
    """{"a.b": value} of every setting, as JSON values."""
    return dict(_leaves(settings.model_dump(mode="json"), ""))


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict) or not tree:
        yield name, tree
        return
    for key, branch in tree.items():
        yield from _leaves(branch, f"{name}.{key}" if name else key)


def shipped(kind: str = "") -> list[str]:
    """Names of the configurations inside the package, or of what lies in a folder beside them:
    ``sweeps``."""
    return sorted(
        path.name.removesuffix(".yaml")
        for path in (resources.files("gaupipe.configs") / kind).iterdir()
        if path.name.endswith(".yaml")
    )


def read_yaml(source: str | Path, kind: str = "") -> Any:
    """What a YAML file holds, or the one of this name that is :func:`shipped`. Raises UserError."""
    path: Any = Path(source)
    if not path.is_file():
        if str(source) not in shipped(kind):
            raise UserError(
                f"no file {str(source)!r}: give the path of a YAML file or one of "
                f"{', '.join(shipped(kind))} (shipped with gaupipe)"
            )
        path = resources.files("gaupipe.configs") / kind / f"{source}.yaml"
    try:
        text = path.read_bytes()
        if len(text) > MAX_BYTES:
            raise ValueError(f"{len(text):,} bytes; at most {MAX_BYTES:,} are read")
        return _parse_yaml(text.decode("utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{source}: not readable as YAML: {' '.join(str(error).split())}") from None


class _StrictLoader(yaml.SafeLoader):
    """YAML without what a settings file cannot mean: a key given twice, dates, which are read as
    text, or aliases, which can refer to themselves."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()
            raise yaml.MarkedYAMLError(
                problem=f"alias *{alias.anchor}: write the value out", problem_mark=alias.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} is given twice",
                    problem_mark=node.value[number][0].start_mark,
                )
        return super().construct_mapping(node, deep)


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _parse_yaml(text: str) -> Any:
    """The value that a YAML text stands for. Raises ValueError for whatever is no plain, finite
    value."""
    try:
        value = yaml.load(text, _StrictLoader)
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        # what yaml's constructors raise of '!!timestamp x', '!!int ""' and the like
        raise ValueError(error) from None
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    _refuse_unusable(value)
    return value


MAX_BYTES = 10**6
"""Size of the largest YAML file that is read; yaml takes seconds for a megabyte."""

MAX_DEPTH = 20
"""Levels that a settings file may nest; the settings have four."""


def _refuse_unusable(value: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError("a whole number has more digits than a setting can have")
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _refuse_unusable(part, depth + 1)


def _apply(tree: dict, override: str, *, settled: bool = True) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"--set {override!r}: should look like phase_b.epochs=20")
    try:
        value = _parse_yaml(text)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--set {override!r}: {text!r} is not a YAML value ({reason})") from None
    if _is_text(key):
        if isinstance(value, int | float):  # a folder may be called 2024
            value = text.strip()
    elif isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
        with contextlib.suppress(ValueError):
            value = float(value)
    place(tree, key, value, f"--set {override!r}", settled=settled)


def _is_text(key: str) -> bool:
    """Whether the setting "a.b" is a text or a path, or none."""
    *parents, leaf = key.split(".")
    try:
        annotation = _section(parents)[leaf].annotation
    except (KeyError, StopIteration):
        return False
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return str in kinds or Path in kinds


def place(tree: dict, key: str, value: Any, where: str, *, settled: bool = True) -> None:
    """Sets "a.b" in a nested dict. Raises UserError, naming ``where``, if "a" is a value.

    What an older name says is written by the name of today, unless ``settled`` is False.
    """
    root = tree
    if settled:
        _settle(root, where)
    *parents, leaf = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise UserError(f"{where}: {parent!r} is a value, not a section")
    tree[leaf] = value
    section, *name = key.split(".")
    if settled and section == "phase_a" and name:
        older_names.follow(root["phase_a"], name[0])


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    location = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        *parents, unknown = problem["loc"]
        section = _section(parents)
        near = difflib.get_close_matches(str(unknown), section, n=1, cutoff=0.5)
        hint = (
            f"did you mean {'.'.join([*map(str, parents), near[0]])!r}?"
            if near
            else f"known: {', '.join(section)}"
        )
        return f"unknown setting {location!r}; {hint}"
    message = problem["msg"].removeprefix("Value error, ")
    given = "" if isinstance(problem["input"], dict) else f", got {problem['input']!r}"
    return f"{location or 'settings'}: {message[0].lower() + message[1:]}{given}"


def _section(parents: list) -> dict[str, FieldInfo]:
    """The settings of the section that ``parents`` leads to, by name."""
    model: Any = Settings
    for parent in parents:
        annotation = model.model_fields[parent].annotation
        model = next(
            kind
            for kind in (annotation, *get_args(annotation))
            if isinstance(kind, type) and issubclass(kind, Section)
        )
    return model.model_fields


def check_used(overrides: Sequence[str], settings: Settings) -> None:
    """Raises UserError for an ``a.b=value`` that plain training does not read, as another setting
    takes its place."""
    for part in ("optim", "epochs"):
        for name in (override.partition("=")[0] for override in overrides):
            if f"{name}.".startswith(f"phase_b.{part}.") and getattr(settings.baseline, part):
                raise UserError(
                    f"--set {name}: baseline.{part} of the configuration takes its place in plain "
                    f"training: --set {name.replace('phase_b', 'baseline')}"
                )
