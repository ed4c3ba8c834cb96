"""The learning curves of a training, and of several together."""

import numpy as np
from PIL import Image

from arguments import sets, tiny
from gaupipe.training import curves, epochs


def test_a_figure_shows_the_metrics_of_each_training():
    first = [
        {"epoch": 1, "train_loss": 2.0, "train_acc": 0.3, "val_acc": None, "gamma": 0.1},
        {"epoch": 2, "train_loss": 1.0, "train_acc": 0.6, "val_acc": 0.5, "gamma": 0.0},
    ]
    second = [{"epoch": 1, "train_loss": 3.0, "train_acc": 0.1, "val_acc": 0.2}]
    figure = curves.curves({"a": first, "b": second})
    losses, accuracies, weights = figure.axes
    drawn = [[*line.get_xydata()] for line in accuracies.get_lines()[:2]]
    np.testing.assert_equal(drawn[0], [[1, np.nan], [2, 0.5]])
    np.testing.assert_equal(drawn[1], [[1, 0.2]])
    training = [line for line in losses.get_lines() if line.get_linestyle() == ":"]
    np.testing.assert_equal(training[0].get_ydata(), [2.0, 1.0])
    np.testing.assert_equal(weights.get_lines()[0].get_ydata(), [0.1, 0.0])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    assert len(curves.curves({"b": second}).axes) == 2  # without a teacher


def test_a_training_leaves_its_curves_and_a_command_overlays_runs(
    tmp_path, in_process, monkeypatch
):
    monkeypatch.setattr(epochs, "draw", curves.draw)
    for seed in ("0", "1"):
        command = ["train", "--run-dir", seed, "--seed", seed, *sets(*tiny(40, 20, 2, depth=1))]
        code, _, err = in_process(*command, cwd=tmp_path)
        assert code == 0 and "curves in 0/plain/standard/curves.png" in err.replace("1/", "0/")
    assert Image.open(tmp_path / "0/plain/standard/curves.png").width > 400
    code, out, _ = in_process("curves", "0", "1", "--out", "both.png", cwd=tmp_path)
    assert code == 0 and out.split() == ["both.png", "both.svg"]
    text = (tmp_path / "both.svg").read_text()
    assert all(f"<!-- {seed}/plain/standard -->" in text for seed in (0, 1))
    assert in_process("curves", "0", cwd=tmp_path)[1].split()[0] == "0/curves.png"
    code, out, _ = in_process("curves", "0", "0", "--out", "0.PNG", cwd=tmp_path)  # twice is once
    assert code == 0 and all((tmp_path / file).is_file() for file in out.split())
