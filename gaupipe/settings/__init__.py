"""Typed settings: one pydantic model for each section of a run's YAML file.

A docstring stands under every field, and becomes a row of a table in docs/commands.md. What
commands may change a setting is the :class:`~gaupipe.settings.sections.Scope` in its annotation.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from gaupipe.attention import ATTENTION
from gaupipe.settings.augment import AugmentSettings
from gaupipe.settings.sections import (
    Count,
    Fraction,
    ModelName,
    Positive,
    Rate,
    Scope,
    Section,
    Weight,
    problem,
    section_of,
)


def _as_key(name: Any) -> Any:
    """An attention's key, for a name in any case: papers write Belief2 and AttentionX."""
    return name.lower() if isinstance(name, str) else name


def _known_attention(key: str) -> str:
    if key not in ATTENTION:
        raise ValueError(f"should be one of {', '.join(ATTENTION)}")
    return key


StudentKey = Annotated[str, BeforeValidator(_as_key), AfterValidator(_known_attention)]


def _known_kind(kind: str) -> str:
    from store.kinds import KINDS  # here, as zarr takes long to import

    if kind not in KINDS:
        raise ValueError(f"should be one of {', '.join(KINDS)}")
    return kind


StoreKind = Annotated[str, AfterValidator(_known_kind)]

FILE_IMAGE_SIZE = 224
"""Pixels of images in files where ``data.image_size`` is null."""

MODEL_ARGS_ELSEWHERE = {
    **dict.fromkeys(
        ("img_size", "in_chans", "num_classes"), "the data set says it (see data.image_size)"
    ),
    **dict.fromkeys(("attention", "attn_layer"), "see model.attention"),
    **{name: f"see model.{name}" for name in ("attention_options", "match_params")},
    "patch_drop_rate": "see train.patch_drop_rate",
    **dict.fromkeys(("stem", "embed_layer"), "see model.stem"),
    **dict.fromkeys(("device", "dtype"), "see the settings device and precision"),
    **dict.fromkeys(("pretrained", "checkpoint_path"), "name the weights in model.name"),
    **dict.fromkeys(
        ("features_only", "dynamic_img_size", "dynamic_img_pad"),
        "every token needs its place on the grid",
    ),
}
"""Keywords of timm.create_model that are not for ``model.args``, and what to do instead."""

Size = Annotated[int, Field(gt=0, le=10_000)]


class KnownModelArgs(BaseModel):
    """Sizes, rates and switches of timm's VisionTransformer, which takes other values silently or
    after minutes."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    depth: Annotated[Size, Field(le=1000)] = 1
    num_heads: Annotated[Size, Field(le=1000)] = 1
    embed_dim: Annotated[int, Field(gt=0, le=100_000)] = 1
    patch_size: Size | list[Size] | tuple[Size, ...] = 1
    mlp_ratio: Annotated[float, Field(ge=0, le=1000)] = 1
    drop_rate: Fraction = 0
    pos_drop_rate: Fraction = 0
    proj_drop_rate: Fraction = 0
    attn_drop_rate: Fraction = 0
    drop_path_rate: Fraction = 0
    qkv_bias: bool | None = None
    qk_norm: bool | None = None
    class_token: bool | None = None
    pre_norm: bool | None = None
    fc_norm: bool | None = None
    rezero: bool = False


ChannelMean = Annotated[float, Field(ge=-1e3, le=1e3)]
ChannelStd = Annotated[float, Field(ge=1e-6, le=1e3)]


class Scaling(BaseModel):
    """The keys of ``data.scaling``: a number for each channel, as shares of 255."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    mean: Annotated[list[ChannelMean], Field(min_length=1)] | None = None
    std: Annotated[list[ChannelStd], Field(min_length=1)] | None = None
    interpolation: Literal["bilinear", "bicubic"] | None = None


def _keywords(args: dict[str, Any]) -> dict[str, Any]:
    """YAML reads ``{a:1}`` as one key without a value, which timm would leave out silently."""
    for name in args:
        if not name.isidentifier():
            hint = ": write {name: value}, with a space" if ":" in name else ""
            raise ValueError(f"{name!r} is no keyword{hint}")
    return args


def _usable_model_args(args: dict[str, Any]) -> dict[str, Any]:
    for name in args.keys() & MODEL_ARGS_ELSEWHERE.keys():
        raise ValueError(f"{name!r} cannot be given here: {MODEL_ARGS_ELSEWHERE[name]}")
    return _validated(args, KnownModelArgs)


def _validated(values: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """The ``values`` as they are. Raises ValueError unless ``model`` takes them."""
    try:
        model.model_validate(values)
    except ValidationError as error:
        raise ValueError(problem(error, model)) from None
    return values


Keywords = Annotated[dict[str, Any], AfterValidator(_keywords)]
ModelArgs = Annotated[Keywords, AfterValidator(_usable_model_args)]


Workers = Annotated[int, Field(ge=0, le=1024)] | Literal["auto"]


class DataSettings(Section):
    """The data set, and how its images become tensors."""

    name: str = "digits"
    """``digits``, ``fashion_mnist``, ``folder``, or ``torch/NAME`` of timm's
    ``create_dataset``."""
    root: Annotated[Path | None, Scope.ANYTIME] = None
    """Folder of the files. With null, ``fashion_mnist`` takes the folder that the environment
    variable GAUPIPE_FASHION_MNIST names, or else the folder of Debian's package."""
    train_images: Positive | None = None
    """Use only this many training images, the same number of each class as far as possible; null
    takes all."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the training images held out, class by class, for validation (``digits`` always
    holds out 20 %)."""
    image_size: Size | None = None
    """Height and width of the images that the model gets, in pixels: a multiple of the patch size.
    Null keeps the size of images held in memory. Images in files then get 224 pixels. A ViT that
    is fine-tuned gets the size that its weights expect."""
    scaling: Annotated[Keywords, AfterValidator(partial(_validated, model=Scaling))] = {}
    """Scaling of pixels by timm's names: ``{mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5],
    interpolation: bicubic}``. A ViT that is fine-tuned sets what its weights expect. Otherwise
    images are resized ``bilinear``, and mean and standard deviation are those of the training
    images held in memory, or of ImageNet for images in files."""
    batch_size: Annotated[Positive, Scope.STUDENT] = 128
    """Training images in a step. Where nothing is trained, a batch has four times as many, up to
    512."""
    workers: Annotated[Workers, Scope.ANYTIME] = "auto"
    """Processes that decode images, 0 to 1024; with 0 the process that trains decodes. ``auto`` is
    0 for images held in memory or in the cache, and for few images; else it is chosen by the
    processor cores, and is larger with a GPU."""
    cache: Annotated[Literal["auto", "none"], Scope.ANYTIME] = "auto"
    """``auto`` keeps the decoded images of image files in the user's cache (GAUPIPE_CACHE), also
    for later commands, where they take less than 20 GB and less than half of the free disk.
    ``none`` decodes in every epoch."""
    unreadable: Literal["refuse", "leave_out"] = "refuse"
    """Image files that cannot be read to their end: ``refuse`` lists them and stops, ``leave_out``
    lists them and goes on without them."""
    buckets: Positive | None = None
    """Groups of training images that several processes share (see docs/scale.md). The number
    of processes must divide it, and may change when a run is continued. Null is the number of
    processes that the run starts with."""

    @property
    def interpolation(self) -> str:
        """How images are resized, by timm's name."""
        return self.scaling.get("interpolation") or "bilinear"

    @property
    def eval_batch_size(self) -> int:
        """Images in a batch where nothing is trained: validation, export, evaluation."""
        return max(self.batch_size, min(4 * self.batch_size, 512))

    @property
    def num_buckets(self) -> int:
        """``buckets`` of a run that has started: null is then a single process."""
        return self.buckets or 1


class ModelSettings(Section):
    """The ViT that is trained: the student with or without distillation, and the teacher that
    phase A trains. ``attention``, ``attention_options``, ``match_params`` and ``student_args``
    concern the student alone, because a teacher has an attention of its own: GauAttention with
    ``phase_a.teacher: gaussian``, standard attention with ``phase_a.teacher: vit``."""

    name: ModelName = "gauvit_pico_patch2_8"
    """Name of the ViT in timm. ``gauvit_pico_patch2_8``, ``gauvit_atto_patch4_32`` and
    ``gauvit_tiny_patch16_224`` are trained from the start. Any other ViT's name, such as
    ``vit_tiny_patch16_224.augreg_in21k``, or ``local-dir:FOLDER`` means that the student is
    fine-tuned from these weights, with a new head."""
    args: ModelArgs = {}
    """Keywords for timm's VisionTransformer that change the preset, e.g. ``{embed_dim: 96,
    depth: 6}``. ``{rezero: true}`` builds blocks without normalisation, each branch multiplied by
    a learned scalar whose initial value is 0."""
    attention: Annotated[StudentKey, Scope.STUDENT] = "standard"
    """The student's attention. Trained weights that ``model.name`` names keep theirs by default."""
    attention_options: Annotated[Keywords, Scope.STUDENT] = {}
    """Keywords of the student's attention class, e.g. ``{zz: false}`` for belief2."""
    match_params: Annotated[bool, Scope.STUDENT] = False
    """Make the FFN smaller, so that the student has as many parameters as with standard
    attention."""
    student_args: Annotated[ModelArgs, Scope.STUDENT] = {}
    """Keywords in which the student differs from ``model.args``, and so from a teacher that phase A
    trains, e.g. ``{depth: 6}``."""
    stem: Annotated[Literal["patch", "conv"], Scope.STUDENT] = "patch"
    """What makes tokens of an image. ``patch`` projects each patch by itself. ``conv`` puts 3 x 3
    convolutions of stride 2 in its place, each with batch norm and ReLU, and a 1 x 1 projection
    (arXiv 2106.14881). The tokens are as many, so the patch size must be a power of two. A ViT that
    is fine-tuned keeps the stem of its weights."""
    init_std: Annotated[Rate | None, Scope.STUDENT] = None
    """Standard deviation of the initialisation of every linear layer; null keeps timm's 0.02."""
    init: Annotated[Literal["normal", "mimetic"], Scope.STUDENT] = "normal"
    """``mimetic`` gives the attention initial weights that look like trained ones (arXiv
    2305.09828). It also makes the position embedding sinusoidal, unless ``pos_embed_std`` is
    set."""
    pos_embed_std: Annotated[Rate | None, Scope.STUDENT] = None
    """Standard deviation of the initialisation of the position embedding; null keeps timm's
    0.02."""


class OptimSettings(Section):
    """The optimizer of the network's weights and the schedule of its learning rate, by timm's names
    (``create_optimizer_v2``, ``create_scheduler_v2``)."""

    name: str = "muon"
    """Name of the optimizer in timm, such as ``muon``, ``adamw`` or ``sgd``. Muon updates
    matrices, and leaves [the other weights](training.md#muon-and-adamw) to AdamW."""
    lr: Rate = 4e-3
    """Learning rate after the warm-up."""
    args: Keywords = {}
    """Further keywords of ``create_optimizer_v2``, e.g. ``{betas: [0.9, 0.95]}`` in place of 0.9
    and 0.999. With ``{layer_decay: 0.75}`` each block of a ViT has 0.75 times the learning rate of
    the next one, as is usual in fine-tuning."""
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
    """Learning rate at the start of the warm-up and at the end of the schedule, at most ``lr``."""
    clip_grad: Rate | None = 1.0
    """Largest norm of the gradient, to which larger gradients are clipped; null does not clip."""
    accumulate: Positive = 1
    """Batches whose gradients are added up before a step."""
    ema: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights. If set, the averaged weights are
    evaluated and saved. Null makes no average; with 1 the average would stay at the untrained
    weights."""


class RowSettings(Section):
    """The per-image parameters (raw numbers of the Gaussians, or embeddings), and the Adam
    optimizer that updates them image by image."""

    lr: Rate = 0.1
    """Learning rate of Adam for the per-image parameters, which are updated once an epoch."""
    initial_std: Weight = 0.0
    """Standard deviation of the initialisation of the per-image parameters; with 0 all images start
    alike."""


class CompressionSettings(Section):
    """The compression network of ``phase_a.per_image: embedding``: an embedding for each image and
    block, from which a decoder computes the raw numbers of the image's Gaussians."""

    embedding: Annotated[int, Field(gt=0, le=65536)] = 256
    """Numbers in an embedding."""
    hidden: Annotated[int, Field(gt=0, le=65536)] = 768
    """Width of the decoder's hidden layer."""


Std = Annotated[float, Field(gt=0, allow_inf_nan=True)]


class LocalSettings(Section):
    """The maps of ``phase_a.teacher: local``: a Gaussian round each token, the same for all images
    and in all blocks of the student."""

    std: Annotated[list[Std], Field(min_length=1)] = [0.7, 1.5, 3.0]
    """Standard deviations in tokens, of which head i takes number i modulo their count. ``.inf``
    makes uniform maps, a control."""
    permuted: bool = False
    """A control: each query gets the Gaussian of another place, always the same one, drawn from
    ``seed``. The maps are as sharp as before, but at wrong places."""


class PhaseASettings(Section):
    """Phase A: the teacher, whose attention maps the student learns from. Only ``teacher``,
    ``teacher_args``, ``max_epochs``, ``stop_accuracy``, ``augment`` and ``optim`` concern a teacher
    that is a trained ViT, and only ``local`` one that is ``local``."""

    teacher: ModelName = "gaussian"
    """``gaussian`` trains a ViT with Gaussian attention, ``vit`` an ordinary ViT.
    ``local-dir:FOLDER`` takes a trained ViT from a folder that timm reads. A timm name such as
    ``deit_tiny_patch16_224.fb_in1k`` takes a ViT with published weights. ``local`` is no network,
    but fixed Gaussians round the tokens, which phase B makes itself."""
    local: LocalSettings = LocalSettings()
    teacher_args: Keywords = {}
    """Keywords for a teacher that is a trained ViT. With ``vit`` they change ``model.args``. For
    any other teacher they go to ``timm.create_model``, e.g. ``{img_size: 32}``."""
    mode: Literal["stochastic", "expected"] = "expected"
    """``stochastic`` samples one point for each query, as the GauTransformer paper does; its
    predictions are then the mean over eight forward passes. ``expected`` uses the exact mean over
    the query's Gaussian."""
    parametrisation: Literal["loc_scale", "paper"] = "loc_scale"
    """``loc_scale`` learns means and logarithms of the standard deviations of a Gaussian; ``paper``
    learns the eight numbers of *GauTransformer, eq. 5*."""
    prior: bool = True
    """Learn a shared prior: one Gaussian for each block, head and query, which all images share."""
    per_image: Literal["table", "embedding", "none"] = "none"
    """What makes the Gaussians of an image differ from the shared prior. ``table`` learns raw
    numbers for each training image, as in the GauTransformer paper. ``embedding`` learns an
    embedding for each training image and block, and a decoder that turns it into raw numbers. With
    ``none`` all images have the Gaussians of the shared prior."""
    compression: CompressionSettings = CompressionSettings()
    max_epochs: Positive = 12
    """Largest number of epochs of phase A."""
    stop_accuracy: Fraction = 0.92
    """Phase A stops after the first epoch with a training accuracy of at least this."""
    augment: bool = False
    """Whether phase A augments the training images too, as the section ``augment`` says."""
    optim: OptimSettings = OptimSettings()
    rows: RowSettings = RowSettings()

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
        return self

    def _without_gaussians(self) -> PhaseASettings:
        if self.is_local:
            if self.teacher_args:
                raise ValueError("teacher_args: the teacher local is no network: see local")
            return self
        if self.teacher == "vit":
            _usable_model_args(self.teacher_args)
        elif "pretrained" in self.teacher_args:
            raise ValueError("teacher_args: a teacher always has its trained weights")
        return self

    @property
    def learns_gaussians(self) -> bool:
        """True if the teacher is a ViT with Gaussian attention, not a trained ViT."""
        return self.teacher == "gaussian"

    @property
    def is_local(self) -> bool:
        """True if the teacher is no network, but fixed Gaussians without a store."""
        return self.teacher == "local"

    @property
    def most_epochs(self) -> int:
        """Epochs of phase A at most; 0 for a teacher that was trained before."""
        return self.max_epochs if self.teacher in ("gaussian", "vit") else 0

    @property
    def learns_of_images(self) -> bool:
        """True if the teacher has parameters of single images."""
        return self.learns_gaussians and self.per_image != "none"


class ExportSettings(Section):
    """The attention-map store: what it holds of the maps, and in which format."""

    kind: StoreKind | None = None
    """What is stored for each query: one of the [kinds of a store](store.md#arrays). Null is the
    smallest kind that loses nothing: what a Gaussian teacher learned of an image (``gaussian`` for
    ``per_image: table``, ``embedding``, or ``prior`` for ``none``), and ``topk`` for a trained
    ViT. With ``encoding: uint8`` it is ``gaussian`` for each Gaussian teacher."""
    encoding: Literal["float16", "uint8"] | None = None
    """``uint8`` stores numbers in 8 bits, in the kinds ``gaussian``, ``topk`` and ``dense``. Null
    is ``uint8`` for ``topk``, and ``float16`` for the other kinds."""
    k: Annotated[int, Field(gt=0, le=255)] | None = None
    """Number of keys that ``topk`` stores for each query. Null is a quarter of the keys, and at
    least 8."""
    views: Annotated[int, Field(gt=1, le=10_000)] | None = None
    """Number of augmented views of each image whose maps are stored. The views are drawn as
    the section ``augment`` says, and phase B trains on the same views. Null stores the maps of the
    images themselves."""
    grid: tuple[Positive, Positive] | None = None
    """(height, width) in tokens of the stored maps of a trained ViT, at most its own: a map is then
    the mean over the queries and the sum over the keys that a larger token covers. Null is the
    student's grid where that is coarser, else the teacher's."""
    layers: Annotated[list[Count], Field(min_length=1)] | None = None
    """Blocks of a trained ViT whose maps are stored, counted from 0, such as those that phase B
    compares: ``[0, 4, 7, 11]``. Null stores the maps of the blocks that phase B compares, or with
    ``phase_b.layer_map`` all."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Precision in which a trained ViT computes its maps and predictions; attention itself stays
    float32. Null is decided as ``precision: auto`` is."""


class TrainSettings(Section):
    """What every ViT is trained with: the student of phase B, the baseline, and the ViT of
    ``gaupipe train``. A student of phase B takes a field of the same name from ``phase_b`` instead,
    where that is set, and a ViT without a teacher from ``baseline``. A setting of ``train`` on the
    command line counts for both, although the file may have others for them."""

    epochs: Positive = 12
    """Number of epochs."""
    optim: OptimSettings = OptimSettings()
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Smoothing of the labels in the cross-entropy with the labels."""
    patch_drop_rate: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the patches that each image loses in the first half of the epochs, except while maps
    are compared (PatchDropout, arXiv 2208.07220)."""
    keep: Literal["last", "best"] = "last"
    """Which epoch the folder ``student`` is of: the last, or the one with the best accuracy on the
    validation images. The other one lies beside it. May be changed when a student is continued,
    also a finished one."""
    patience: Positive | None = None
    """Early stopping: training ends when this many epochs in a row had no better accuracy on the
    validation images than the best before them. Null trains all epochs."""


class TrainChanges(Section):
    """Fields of :class:`TrainSettings` in which one kind of training differs from ``train``."""

    epochs: Positive | None = None
    """Null is ``train.epochs``."""
    optim: Annotated[Keywords, AfterValidator(partial(_validated, model=OptimSettings))] = {}
    """Settings of ``train.optim`` that are others here, e.g. ``{lr: 0.002}``."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Null is ``train.label_smoothing``."""
    patch_drop_rate: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Null is ``train.patch_drop_rate``."""
    keep: Literal["last", "best"] | None = None
    """Null is ``train.keep``."""
    patience: Positive | None = None
    """Null is ``train.patience``; as many epochs as there are end no training early."""

    def over(self, train: TrainSettings) -> TrainSettings:
        """The ``train`` settings with what is set here in their place, ``optim`` key by key."""
        fields = train.model_dump()
        fields["optim"] |= self.optim
        for name in fields.keys() - {"optim"}:
            value = getattr(self, name)
            if value is not None:
                fields[name] = value
        return TrainSettings.model_validate(fields)


class PhaseBSettings(TrainChanges):
    """Phase B: what distillation adds to a training. The student, an ordinary ViT, learns from the
    labels, the teacher's predictions and the stored maps."""

    alpha: Weight = 0.0
    """Weight of L_soft, the cross-entropy with the teacher's predictions. In the GauTransformer
    paper alpha, beta and gamma are 0.2, 0.1 and 0.7 on CIFAR, and gamma is constant."""
    beta: Weight = 1.0
    """Weight of L_hard, the cross-entropy with the labels."""
    gamma: Weight = 0.1
    """Weight of L_feat, the divergence from the stored attention maps, at the start of the
    schedule."""
    gamma_schedule: Literal["constant", "linear", "cosine", "stop_after"] = "stop_after"
    """``linear`` and ``cosine`` lower gamma to 0 over ``gamma_epochs``; ``stop_after`` switches
    gamma off after ``gamma_epochs``; ``constant`` never changes gamma, as in the GauTransformer
    paper."""
    gamma_epochs: Positive | None = None
    """Epochs until gamma is 0; null means a third of the student's epochs."""
    layer_map: list[Count | None] | None = None
    """For each block of the student the number of the stored block that it is compared with,
    counted from 0, or null for no comparison. Without a list each block is compared with the stored
    block of the same number. If the numbers of blocks differ, evenly spaced stored blocks are
    taken."""
    head_map: list[Count] | Literal["mean"] | None = None
    """For each head of the student the number of the stored head that it is compared with, counted
    from 0. ``mean`` compares each head with the mean over the stored heads, of which there may then
    be another number. Null compares each head with the stored head of the same number."""
    shuffle_maps: bool = False
    """A control: every image gets the maps of another image. The control shows whether it matters
    that the maps belong to the image."""
    warm_start: Literal["none", "teacher", "slice", "exact"] = "none"
    """``teacher`` copies the teacher's patch and position embedding, V, output projection, FFN,
    norms and head. If the teacher is a trained ViT, ``teacher`` also copies Q and K. A student that
    has Gaussians itself gets the teacher's. ``exact`` is for ``phase_a.per_image: none`` and
    students with ``attention_options: {prior: true}``: the prior goes into the scores and Q is 0,
    so that the student computes what the teacher does before its first step. ``slice`` is for a
    student that is smaller than a trained ViT: evenly spaced blocks and heads of the teacher, and
    the principal components of its residual stream."""
    temperature: Rate = 1.0
    """The attention maps p of teacher and student become softmax(log p / temperature) before they
    are compared."""
    direction: Literal["teacher_student", "student_teacher"] = "teacher_student"
    """``teacher_student`` is KL(teacher || student), which makes the student attend wherever the
    teacher does. ``student_teacher`` is KL(student || teacher), the order of *GauTransformer,
    eq. 9*."""

    def gamma_ends(self, epochs: int) -> int:
        """``gamma_epochs``, or what null means for a student of so many ``epochs``."""
        return self.gamma_epochs or -(-epochs // 3)

    @model_validator(mode="after")
    def _consistent(self) -> PhaseBSettings:
        if self.alpha + self.beta + self.gamma == 0:
            raise ValueError("alpha, beta and gamma are all 0: nothing is left to learn from")
        return self


class BaselineSettings(TrainChanges):
    """The baseline: the student's ViT, trained on the labels alone, as ``gaupipe train`` does
    too."""

    epochs: Count | None = None
    """Epochs of the baseline. In a run with both phases null is as many as both have together, and
    ``train.epochs`` otherwise, and in ``gaupipe compare``. With 0 ``gaupipe run`` trains none."""

    def over(self, train: TrainSettings) -> TrainSettings:
        if self.epochs == 0:
            return self.model_copy(update={"epochs": None}).over(train)
        return super().over(train)


class LogSettings(Section):
    """Views of a training while it runs, beside the metrics of its epochs."""

    to: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """Where losses and metrics are shown: any of ``tensorboard``, ``wandb`` (Weights & Biases) and
    ``trackio``, each of which is an extra of the same name."""
    every: Count = 50
    """Steps (batches) between two lines of steps.jsonl, which the loggers of ``to`` get too; 0
    writes none."""


class Settings(Section):
    """Everything that determines a run."""

    seed: Annotated[int, Field(ge=0, lt=2**31), Scope.STUDENT] = 0
    """Seed of all random numbers of the run."""
    device: Annotated[str, Scope.ANYTIME] = "auto"
    """``auto`` takes a GPU where there is one. Any other value is the name of a torch device, such
    as ``cpu`` or ``cuda:1``."""
    threads: Annotated[Annotated[int, Field(gt=0, le=1024)] | None, Scope.ANYTIME] = None
    """Processor threads for torch; null leaves torch's choice."""
    precision: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Scope.STUDENT] = "auto"
    """Precision of the forward pass. ``bfloat16`` and ``float16`` are mixed precision: Gaussians,
    coordinates and losses stay float32. ``auto`` is decided when the run begins, and written to its
    ``config.yaml``: ``bfloat16`` for a ViT of width 192 or more where the processor or GPU
    multiplies such numbers, else ``float32``."""
    compile: Annotated[bool, Scope.STUDENT] = False
    """Compile the forward pass with torch.compile."""
    grad_checkpointing: Annotated[bool, Scope.ANYTIME] = False
    """Compute the activations of each block again in the backward pass (timm's
    ``set_grad_checkpointing``): less memory, more time, the same results."""
    checkpoint_minutes: Annotated[Weight | None, Scope.ANYTIME] = 10.0
    """Minutes after which a training writes a checkpoint in the middle of an epoch; 0 writes one
    after every step of the optimizer. Null writes checkpoints between epochs alone."""
    download: Annotated[bool, Scope.ANYTIME] = False
    """Let torchvision and timm fetch a data set and published weights that are not on this
    machine."""
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    augment: Annotated[AugmentSettings, Scope.STUDENT] = AugmentSettings()
    train: Annotated[TrainSettings, Scope.STUDENT] = TrainSettings()
    phase_a: PhaseASettings = PhaseASettings()
    export: ExportSettings = ExportSettings()
    log: Annotated[LogSettings, Scope.ANYTIME] = LogSettings()
    phase_b: Annotated[PhaseBSettings, Scope.STUDENT] = PhaseBSettings()
    baseline: Annotated[BaselineSettings, Scope.STUDENT] = BaselineSettings()

    def with_section(self, name: str, **changes: Any) -> Settings:
        """These settings with other values in a section, which are not checked again."""
        section = getattr(self, name).model_copy(update=changes)
        return self.model_copy(update={name: section})

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
    def student_training(self) -> TrainSettings:
        """What the student of phase B is trained with."""
        return self.phase_b.over(self.train)

    @property
    def baseline_training(self) -> TrainSettings:
        """What a ViT without a teacher is trained with."""
        return self.baseline.over(self.train)

    @property
    def baseline_epochs(self) -> int:
        """Epochs of the baseline of a run with both phases."""
        if self.baseline.epochs is not None:
            return self.baseline.epochs
        return self.student_training.epochs + self.phase_a.most_epochs

    def with_training(self, *, distilled: bool) -> Settings:
        """These settings for one student alone: ``train`` is what it is trained with, and neither
        ``phase_b`` nor ``baseline`` changes that."""
        train = self.student_training if distilled else self.baseline_training
        phase_b = self.phase_b.model_copy(update=dict(TrainChanges()))
        changes = {"train": train, "phase_b": phase_b, "baseline": BaselineSettings()}
        return self.model_copy(update=changes)

    def without_student(self) -> Settings:
        """These settings with the defaults of whatever phase A does not read."""
        model = self.model
        defaults = ModelSettings()
        read_by_students = ["attention", "attention_options", "match_params", "student_args"]
        if not self.phase_a.most_epochs:  # the teacher is not built of these settings
            read_by_students.append("stem")
        unread = {name: getattr(defaults, name) for name in read_by_students}
        model = model.model_copy(update=unread)
        changes = {
            "model": model,
            "train": TrainSettings(),
            "phase_b": PhaseBSettings(),
            "baseline": BaselineSettings(),
            "export": ExportSettings(),
        }
        return self.model_copy(update=changes)

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if self.phase_b.warm_start == "exact":
            self._check_exact()
        if self.phase_b.warm_start != "none" and self.phase_a.is_local:
            raise ValueError("phase_b.warm_start: the teacher local has no weights: take none")
        if self.phase_b.warm_start == "slice" and self.phase_a.learns_gaussians:
            raise ValueError(
                "phase_b.warm_start=slice is cut from a trained ViT: take warm_start=teacher for a "
                "teacher with Gaussians, or phase_a.teacher=vit"
            )
        return self

    def _check_exact(self) -> None:
        """A student that is to be its teacher needs one that it can be."""
        teacher = self.phase_a
        model = self.model
        needed = {
            "phase_a.teacher=gaussian": teacher.learns_gaussians,
            "phase_a.per_image=none": teacher.per_image == "none",
            "phase_a.mode=expected": teacher.mode == "expected",
            "model.attention=standard": model.attention == "standard",
            "model.attention_options={prior: true}": model.attention_options.get("prior") is True,
            "model.match_params=false": not model.match_params,
            "model.student_args={} but for drop rates": all(
                name.endswith("_rate") for name in model.student_args
            ),
        }
        missing = [name for name, there in needed.items() if not there]
        if missing:
            raise ValueError(f"phase_b.warm_start=exact needs {missing[0]}")


def scope(name: str) -> Scope:
    """The scope of the setting "a.b": that of its field, or of the innermost section around it that
    has one. Keywords in a setting, as in "model.args.depth", have the scope of the setting."""
    section: type[Section] | None = Settings
    innermost = Scope.RUN
    for part in name.split("."):
        field = section.model_fields.get(part) if section else None
        if field is None:
            break
        for fact in field.metadata:
            if isinstance(fact, Scope):
                innermost = fact
        section = section_of(field.annotation)
    return innermost
