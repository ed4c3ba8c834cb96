"""The paper's four commands on one's own folder, and ``run`` beside its stages one by one."""

import json

import numpy as np
import pytest

import gaupipe
from arguments import sets
from pictures import facts, photos
from runs import metrics
from stages.runs.choices import choose

TINY = sets("model.args.embed_dim=16", "model.args.depth=2", "train.epochs=2", "threads=1")
PLACE = {"name": "folder", "root": "photos"}


def test_the_papers_commands_on_a_folder_of_twelve_photos(in_process, tmp_path):
    photos(tmp_path / "photos", count=6)
    commands = (
        ("train", "--data", "photos", *TINY),  # a run of its own, whose teacher is local
        ("phase-a", "--data", "photos", *TINY),
        ("export-maps",),
        ("phase-b", "--student", "belief2"),
    )
    for command in commands:
        code, _, err = in_process(*command, cwd=tmp_path)
        assert code == 0 and "nothing to" not in err, err
    code, out, err = in_process("inspect", "--json", cwd=tmp_path)
    assert code == 0, err
    shown = json.loads(out)
    assert (shown["kind"], shown["mode"], shown["label_passes"]) == ("embedding", "stochastic", 8)

    folder = tmp_path / "runs" / "photos-gaussian"
    run = gaupipe.open_run(folder)
    for maps in run.maps([0, 1]):
        assert (maps[0] - maps[1]).abs().max() > 0.01
    rows = metrics(folder / "phase_b" / "belief2" / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert row["gamma"] == 0.7
        losses = [row["loss_soft"], row["loss_hard"], row["loss_feat"]]
        np.testing.assert_allclose(row["train_loss"], np.dot([0.2, 0.1, 0.7], losses), rtol=1e-5)


@pytest.mark.parametrize(
    "teacher, unlabelled", [("gaussian", False), ("local", False), (None, True)]
)
def test_a_run_is_its_stages_bit_for_bit(in_process, tmp_path, teacher, unlabelled):
    photos(tmp_path / "photos" / "train", count=6)
    if unlabelled:
        photos(tmp_path / "photos" / "unlabelled", count=3, size=(9, 8))
    asked = ["--data", "photos", *TINY, "--set", "phase_a.max_epochs=2"]
    if teacher is not None:
        asked += ["--teacher", teacher]
    commands = (
        ("run", *asked, "--run-dir", "whole"),
        ("phase-a", *asked, "--run-dir", "steps"),
        ("export-maps", "--run-dir", "steps"),
        ("phase-b", "--run-dir", "steps"),
    )
    for command in commands:
        code, _, err = in_process(*command, cwd=tmp_path)
        assert code == 0, err
    whole, steps = tmp_path / "whole", tmp_path / "steps"
    assert metrics(whole / "phase_a/metrics.jsonl") == metrics(steps / "phase_a/metrics.jsonl")
    trained = "phase_b/standard/metrics.jsonl"
    assert metrics(whole / trained) == metrics(steps / trained)
    names = ["config.yaml", "split.json", "phase_b/standard/student/model.safetensors"]
    for store in ("maps.zarr", "unlabelled.zarr"):
        chunks = (path for path in whole.glob(f"{store}/**/c/**/*") if path.is_file())
        names += [str(path.relative_to(whole)) for path in chunks]
    assert (len(names) > 3) is (teacher != "local")
    for name in names:
        assert (whole / name).read_bytes() == (steps / name).read_bytes(), name


def test_phase_a_by_itself_takes_the_papers_teacher_and_a_run_what_evidence_speaks_for():
    def teacher(paper, **more):
        return choose(facts(**more), PLACE, False, {}, paper=paper).given("phase_a.teacher")

    assert (teacher(paper=True), teacher(paper=False)) == ("gaussian", "local")
    assert teacher(paper=True, unlabelled=9) == teacher(paper=False, unlabelled=9) == "resnet"


@pytest.mark.parametrize(
    "pixels, gpu, sizes", [(8, False, (32, 128)), (64, False, (32, 128)), (128, True, (128, 512))]
)
def test_the_decoder_grows_with_the_gaussians_of_an_image(pixels, gpu, sizes):
    given = {"phase_a": {"teacher": "gaussian"}}
    choices = choose(facts(size=(pixels, pixels)), PLACE, gpu, given)
    compression = choices.given("phase_a.compression")
    assert (compression["embedding"], compression["hidden"]) == sizes


def test_what_the_user_says_of_the_papers_teacher_stays():
    given = {"phase_a": {"per_image": "none", "mode": "expected"}, "phase_b": {"gamma": 0.5}}
    choices = choose(facts(), PLACE, False, given, paper=True)
    assert choices.given("phase_a.prior") is None  # without it nothing would be learned
    assert choices.given("phase_a.mode") == "expected" and choices.given("phase_b.gamma") == 0.5
    assert choices.reasons["phase_b.gamma"] == "as you set it"
