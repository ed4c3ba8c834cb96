"""The notebook examples/tour.ipynb runs from top to bottom, here with less of everything."""

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt

NOTEBOOK = Path(__file__).parent.parent / "examples" / "tour.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
SMALL = """
folder, epochs = Path("tour"), 1
settings = load("digits_expected", [
    "threads=1", "data.train_images=512", "phase_a.max_epochs=1", "train.epochs=1",
    "phase_b.gamma_epochs=1", "model.args={depth: 4, embed_dim: 16, num_heads: 4}",
])
"""


def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plt.switch_backend("Agg")  # which also closes the figures of other tests
    names: dict = {}
    for cell in CELLS:
        if cell["cell_type"] == "code":
            small = "parameters" in cell["metadata"].get("tags", [])
            exec(SMALL if small else "".join(cell["source"]), names)
    figures = plt.get_fignums()
    plt.close("all")
    said = capsys.readouterr().out
    assert len(figures) == 6
    assert "belief2 (distilled): top-1 0." in said and "ResidualAttention: top-1 0." in said
    assert names["after"].shape == (8, 10) and 0 <= names["accuracy"] <= 1
    assert (names["before"] - names["after"]).abs().max() < 1e-4
    assert list(tmp_path.iterdir()) == [tmp_path / "tour"]


def test_the_notebook_was_kept_whole_and_without_places_of_a_machine():
    text = NOTEBOOK.read_text()
    assert not re.search(r"/(home|root|tmp|work|Users)/", re.sub(r'"image/png": ".*"', "", text))
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert any("image/png" in shown.get("data", {}) for cell in code for shown in cell["outputs"])
    for shown in (shown for cell in code for shown in cell["outputs"]):
        assert shown["output_type"] in ("stream", "display_data"), "an error was kept"
