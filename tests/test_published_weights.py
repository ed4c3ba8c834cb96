"""Trained weights that meet another attention, on every way by which timm loads them."""

import warnings
from functools import partial

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.utils import CheckpointSaver, ModelEmaV3

from gaupipe.attention import comparing
from gaupipe.models import convert, save_student
from gaupipe.system.errors import UserError
from gaupipe.vit.saving import load_folder
from vits import TINY, randomised, small

SIZES = {"img_size": 32, "num_classes": 5, "depth": 2, "embed_dim": 48, "num_heads": 3}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
EXACT = ("standard", "belief2")
OTHERS = tuple(key for key in comparing() if key not in EXACT)


@pytest.fixture
def published(tmp_path):
    """A model of timm's own attention, and a folder with its weights in both forms."""
    model = small()
    folder = tmp_path / "published"
    save_student(model, folder)
    torch.save(model.state_dict(), folder / "weights.pth")
    return model, folder


def by_pretrained(folder, **arguments):
    file = {"file": str(folder / "model.safetensors"), "num_classes": 5}
    return timm.create_model(
        TINY, pretrained=True, pretrained_cfg_overlay=file, **SIZES, **arguments
    )


def by_checkpoint(folder, **arguments):
    file = next(iter(folder.glob("*.pth")), folder / "model.safetensors")
    return timm.create_model(TINY, checkpoint_path=str(file), **SIZES, **arguments)


def by_folder(folder, **arguments):
    return timm.create_model(f"local-dir:{folder}", pretrained=True, **arguments)


WAYS = [by_pretrained, by_checkpoint, by_folder]


@pytest.mark.parametrize("load", WAYS)
@pytest.mark.parametrize("key", EXACT)
def test_belief2_computes_what_the_published_model_does(published, key, load):
    model, folder = published
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        loaded = load(folder, attn_layer=f"gau_{key}").eval()
        torch.testing.assert_close(loaded(IMAGES), model(IMAGES), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["belief2", "belief_star", "belief"])
def test_weights_assigned_to_a_model_without_memory_are_all_there(published, attention):
    options = {"gated": True} if attention == "belief" else {}
    arguments = dict(base=TINY, attention=attention, attention_options=options, **SIZES)
    model = timm.create_model("gauvit_converted", device="meta", **arguments)
    weights = published[0].state_dict()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model.load_state_dict(weights, assign=True)
        loaded = timm.create_model("gauvit_converted", **arguments)
        loaded.load_state_dict(weights)
        torch.testing.assert_close(model.eval()(IMAGES), loaded.eval()(IMAGES))


@pytest.mark.parametrize("load", WAYS)
@pytest.mark.parametrize("key", OTHERS)
def test_others_are_converted_and_say_that_they_need_fine_tuning(published, key, load):
    model, folder = published
    with pytest.warns(UserWarning, match=r"standard attention .*convert.* fine-tune"):
        loaded = load(folder, attn_layer=f"gau_{key}").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(IMAGES), convert(model, key)(IMAGES))


@pytest.mark.parametrize("key", comparing())
def test_weights_of_our_own_are_loaded_as_they_are_and_without_a_word(key, tmp_path):
    model = small(attn_layer=f"gau_{key}")
    save_student(model, tmp_path / "student")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for again in (
            by_folder(tmp_path / "student"),
            by_pretrained(tmp_path / "student", attn_layer=f"gau_{key}"),
            by_checkpoint(tmp_path / "student", attn_layer=f"gau_{key}"),
        ):
            torch.testing.assert_close(again.eval()(IMAGES), model(IMAGES), rtol=0, atol=0)


@pytest.mark.parametrize("key", ["belief", "belief2", "attentionx"])
def test_a_training_of_timms_goes_on_with_the_weights_that_it_saved(published, key, tmp_path):
    """The ways of timm's train.py, --model-ema and avg_checkpoints.py: nothing is converted
    twice."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the outputs are others now
        trained = by_folder(published[1], attn_layer=f"gau_{key}").eval()
    average = ModelEmaV3(trained)
    average.update(trained)
    saver = CheckpointSaver(
        trained, torch.optim.SGD(trained.parameters()), model_ema=average, checkpoint_dir=tmp_path
    )
    saver.save_checkpoint(epoch=0)
    checkpoint = tmp_path / "last.pth.tar"
    weights = timm.models.load_state_dict(checkpoint)
    mean = {name: ((w.double() + w.double()) / 2).float() for name, w in weights.items()}
    torch.save(mean, tmp_path / "mean.pth")

    resumed = timm.create_model(TINY, attn_layer=f"gau_{key}", **SIZES)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert timm.models.resume_checkpoint(resumed, checkpoint) == 1
        for again in (
            resumed,
            timm.create_model(
                TINY, attn_layer=f"gau_{key}", checkpoint_path=str(checkpoint), **SIZES
            ),
            by_checkpoint(tmp_path, attn_layer=f"gau_{key}"),
        ):
            torch.testing.assert_close(again.eval()(IMAGES), trained(IMAGES), rtol=0, atol=0)


def test_a_loaded_belief2_is_saved_with_the_phi_that_it_computes(published, tmp_path):
    model, folder = published
    loaded = by_pretrained(folder, attn_layer="gau_belief2")
    save_student(loaded, tmp_path / "student")
    with torch.no_grad():
        for again in (by_folder, partial(load_folder, remedy="")):
            outputs = again(tmp_path / "student").eval()(IMAGES)
            torch.testing.assert_close(outputs, model(IMAGES), rtol=1e-5, atol=1e-5)


def test_a_head_for_other_classes_changes_nothing(published):
    """timm then loads whatever fits, and what is missing stays at random."""
    model, folder = published
    other = timm.create_model(
        TINY,
        pretrained=True,
        pretrained_cfg_overlay={"file": str(folder / "model.safetensors"), "num_classes": 5},
        attn_layer="gau_belief2",
        **{**SIZES, "num_classes": 3},
    ).eval()
    with torch.no_grad():
        features = model.forward_features(IMAGES)
        torch.testing.assert_close(other.forward_features(IMAGES), features, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("load", WAYS[:2])
@pytest.mark.parametrize(
    "trained, asked, message",
    [
        ("xsa", "belief", "trained with ExclusiveAttention, the model has BeliefAttention"),
        ("belief", "standard", "trained with BeliefAttention, the model has StandardAttention"),
        ("standard", "gaussian", "no queries and keys"),
    ],
)
def test_weights_of_a_third_attention_are_refused(trained, asked, message, load, tmp_path):
    model = randomised(small(attn_layer=f"gau_{trained}"))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load(tmp_path, attn_layer=f"gau_{asked}")
