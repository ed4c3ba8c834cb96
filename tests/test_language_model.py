"""examples/language_model.py, on a text of a few words and with models of one block."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "examples" / "language_model.py"

SMALL = [
    *("--layers", "1", "--width", "16", "--heads", "2", "--context", "8"),
    *("--batch", "2", "--steps", "3", "--log-every", "3", "--timed-steps", "1"),
]


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Runs the script in this process; the text is in ``tmp_path``."""
    spec = importlib.util.spec_from_file_location("language_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 12)

    def run(*more):
        given = [str(text), "--out", str(tmp_path / "runs"), *more]
        monkeypatch.setattr(sys, "argv", ["language_model.py", *SMALL, *given])
        module.main()

    run.module = module
    return run


def test_every_attention_is_trained_at_equal_parameters_and_not_again(example, tmp_path, capsys):
    example("--sweep", "--seeds", "0", "1")
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if "|" in line]
    table = {row[0].strip(): row for row in rows[2:]}
    assert list(table) == list(example.module.ATTENTIONS)
    sizes = [int(row[1].replace(",", "")) for row in table.values()]
    assert max(sizes) - min(sizes) <= 17 + 16  # half a hidden unit of the FFN, above and below
    kept = json.loads((tmp_path / "runs" / "belief2-1.json").read_text())
    assert kept["result"]["seed"] == 1 and len(kept["result"]["training_loss"]) == 3

    example("--attention", "belief", "--seeds", "1")
    assert "step 3:" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="other settings"):
        example("--attention", "belief", "--lr", "1")


def test_the_same_seed_gives_the_same_training(example, tmp_path):
    example("--attention", "belief_star", "--model", "llama", "--sample", "3")
    path = tmp_path / "runs" / "belief_star-0.json"
    before = json.loads(path.read_text())["result"]["training_loss"]
    path.unlink()
    example("--attention", "belief_star", "--model", "llama")
    assert json.loads(path.read_text())["result"]["training_loss"] == before
    assert len(set(before)) == 3
