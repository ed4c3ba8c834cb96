"""Commands as functions of Python: the same files and checks, results with types, no exit."""

import logging

import pytest
import timm
import torch

import gaupipe
import store
from arguments import sets, tiny
from gaupipe.system.errors import UserError
from gaupipe.system.messages import LOG
from gaupipe.vit.saving import save_student
from pictures import photos
from runs import metrics

TINY = tiny(40, 20, 2, depth=1)
SETTINGS = {"data.train_images": 40, "batch_size": 20, "epochs": 2, "threads": 1} | {
    "model.args": {"depth": 1, "embed_dim": 16, "num_heads": 2}
}


def test_a_training_is_that_of_the_command(tmp_path, in_process, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    command = ["train", "--run-dir", "a", "--student", "xsa", "--seed", 3, *sets(*TINY)]
    assert in_process(*command)[0] == 0
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    monkeypatch.setattr(LOG, "handlers", [handler])
    trained = gaupipe.train(student="xsa", run_dir="b", seed=3, **SETTINGS)
    assert capfd.readouterr() == ("", "") and any("epoch 2/2: loss" in line for line in said)
    assert metrics(tmp_path / "a/plain/xsa/metrics.jsonl") == metrics(
        trained.folder / "metrics.jsonl"
    )
    assert trained.accuracy == trained.metrics[-1]["val_acc"] and len(trained.metrics) == 2
    saved = timm.create_model("local-dir:b/plain/xsa/student", pretrained=True).eval()
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(trained.student(images), saved(images))
    again = gaupipe.train(student="xsa", run_dir="b", resume=True)  # with its own settings
    assert again.metrics == trained.metrics


def test_a_run_has_a_student_a_plain_vit_and_a_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = gaupipe.run("digits_expected", run_dir="run", **SETTINGS, **{"phase_a.max_epochs": 1})
    assert ran.student.folder.name == ran.plain.folder.name == "standard"
    assert [line.epochs for line in ran.lines] == [1, 2, len(ran.plain.metrics)]
    assert ran.lines[1].val_acc == ran.student.accuracy
    maps = store.open(gaupipe.export("run", kind="dense", out="dense.zarr"))
    assert maps.schema.kind == "dense" and len(maps) == 40
    (stored,) = torch.from_numpy(maps.gather([7])["maps"]).float()
    torch.testing.assert_close(stored, ran.run.maps([7])[0], atol=2e-3, rtol=0)


def test_the_maps_of_a_model_are_stored(tmp_path):
    photos(tmp_path / "photos")
    save_student(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1), tmp_path / "vit")
    url = gaupipe.export(
        model=str(tmp_path / "vit"), images=tmp_path / "photos", out=tmp_path / "maps.zarr"
    )
    maps = store.open(url)
    assert maps.schema.layers == 1 and len(maps) == len(list((tmp_path / "photos").rglob("*.png")))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: gaupipe.train(data="absent"), "--data absent: no such folder"),
        (lambda: gaupipe.train("digits", **{"phase_b.epochs": 1}), "^phase_b.epochs: phase_b is"),
        (lambda: gaupipe.train("digits", epoch=1), "^unknown setting 'epoch'"),
        (lambda: gaupipe.train("digits", epochs=1, **{"train.epochs": 2}), "given too: give one"),
        (lambda: gaupipe.train(epochs=1, overrides="train.epochs=2"), "given too: give one"),
        (lambda: gaupipe.train(epochs=1, train={"epochs": 2}), "given too: give one"),
        (lambda: gaupipe.train(train={"epochs": 2}, epochs=1), "given too: give one"),
        (lambda: gaupipe.train(lr=1, train={"epochs": 2}), "train: replaces train.optim.lr"),
        (
            lambda: gaupipe.train(train={"epochs": 1}, overrides={"train.epochs": 2}),
            "given too: give one",
        ),
        (
            lambda: gaupipe.train(epochs=1, overrides={"train": {"epochs": 2}}),
            "given too: give one",
        ),
        (lambda: gaupipe.train("digits", lr=-1), "^train.optim.lr: input should be greater than 0"),
        (lambda: gaupipe.train("digits", data="."), "keep it and set data.name=folder"),
        (
            lambda: gaupipe.run(unlabelled=".", overrides="data.unlabelled=."),
            "the setting data.unlabelled is given too",
        ),
        (lambda: gaupipe.run("absent.yaml"), "no file 'absent.yaml'"),
        (lambda: gaupipe.export("absent"), "absent is not a run directory"),
        (lambda: gaupipe.export(model="vit"), "--model NAME and --images PATH belong together"),
        (lambda: gaupipe.export(model="vit", images=".", overrides="seed=0"), "^seed: leave it"),
    ],
)
def test_mistakes_raise_and_write_nothing(tmp_path, monkeypatch, call, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as refused:
        call()
    assert "--set" not in str(refused.value)  # which Python has not
    assert list(tmp_path.iterdir()) == []
