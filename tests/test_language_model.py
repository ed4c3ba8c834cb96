"""examples/language_model.py, on a text of a few words and with models of one block."""

import json
import re

import pytest

SMALL = [
    *("--layers", "1", "--width", "16", "--heads", "2", "--context", "8"),
    *("--batch", "2", "--steps", "3", "--log-every", "3", "--timed-steps", "1"),
]


@pytest.fixture
def language_model(tmp_path, example):
    """Runs the script in this process; the text is in ``tmp_path``."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 12)
    module, run = example("language_model")

    def train(*more):
        run(*SMALL, text, "--out", tmp_path / "runs", *more)

    train.module = module
    return train


def test_every_attention_is_trained_at_equal_parameters_and_not_again(
    language_model, tmp_path, capsys
):
    language_model("--sweep", "--seeds", "0", "1")
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if "|" in line]
    table = {row[0].strip(): row for row in rows[2:]}
    assert list(table) == list(language_model.module.ATTENTIONS)
    assert len({row[1] for row in table.values()}) == 1  # parameters
    files = [tmp_path / "runs" / f"{name}-1.json" for name in table]
    losses = [json.loads(path.read_text())["result"]["training_loss"] for path in files]
    assert {len(steps) for steps in losses} == {3}
    assert len({steps[0] for steps in losses}) == len(table)  # the options reach the model

    language_model("--attention", "belief", "--seeds", "1")
    assert "step 3:" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        language_model("--attention", "belief", "--lr", "1")
    message = capsys.readouterr().err
    assert re.fullmatch(
        "language_model.py: .*other settings .lr was 0.003, now it is 1.0.*\n", message
    )


def test_the_same_seed_gives_the_same_training(language_model, tmp_path):
    language_model("--attention", "belief", "--model", "llama", "--sample", "3")
    path = tmp_path / "runs" / "belief-0.json"
    before = json.loads(path.read_text())["result"]["training_loss"]
    path.unlink()
    language_model("--attention", "belief", "--model", "llama")
    assert json.loads(path.read_text())["result"]["training_loss"] == before
    assert len(set(before)) == 3


def test_another_text_may_be_held_out(language_model, tmp_path, capsys):
    """Its characters count into the alphabet, its loss into the table; the models are others."""
    language_model()
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("SPHINX OF BLACK QUARTZ, JUDGE MY VOW. " * 3)
    with pytest.raises(SystemExit, match="2"):
        language_model("--validation", held_out)
    assert "other settings" in capsys.readouterr().err
    data, validation, alphabet = language_model.module.read(tmp_path / "text.txt", held_out)
    assert "".join(alphabet[i] for i in data) == (tmp_path / "text.txt").read_text()
    assert "".join(alphabet[i] for i in validation) == held_out.read_text()
