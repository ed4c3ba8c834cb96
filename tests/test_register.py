"""An attention of the user's own, without a fork."""

import json
import subprocess
import sys

import pytest
import timm
import torch

import gaupipe
from arguments import sets, tiny
from gaupipe.attention import ATTENTION
from gaupipe.attention.base import StudentAttention
from gaupipe.system.errors import UserError

MINE = """
import gaupipe
from gaupipe.attention.base import StudentAttention


class Residual(StudentAttention):
    def combine(self, mh, v):
        return self.proj(mh + v)


gaupipe.register("residual", Residual)
"""


def command(*arguments, cwd):
    words = [sys.executable, "-m", "gaupipe", *map(str, arguments)]
    return subprocess.run(words, cwd=cwd, text=True, capture_output=True)


def test_an_imported_attention_is_trained_and_its_folder_says_what_is_missing(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    mine = ("--import", "mine.py")
    settings = sets(*tiny(100, 50, 2), "train.epochs=1")
    done = command(*mine, "train", "--student", "Residual", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    student = tmp_path / "runs/digits/plain/residual/student"
    assert "residual" in json.dumps(json.loads((student / "config.json").read_text()))
    done = command(*mine, "evaluate", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    without = command("evaluate", cwd=tmp_path)
    assert without.returncode == 2 and "residual" in without.stderr.splitlines()[-1]


def test_the_processes_of_a_comparison_know_an_imported_attention(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    settings = sets(*tiny(100, 50, 1, depth=1))
    rows = ("--seeds", 0, "--row", "plain ViT, residual", "--jobs", 2)
    compare = ("--import", "mine.py", "compare", "--students", "residual", *rows, "--json")
    done = command(*compare, *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [len(row["runs"]) for row in rows] == [1, 1] and not any(row["failed"] for row in rows)


def test_a_registered_attention_is_one_of_timm_too(monkeypatch):
    class Residual(StudentAttention):
        def combine(self, mh, v):
            return self.proj(mh + v)

    monkeypatch.setattr(ATTENTION, "data", {**ATTENTION.data})
    with pytest.raises(UserError, match=r"gaupipe.register\('mine', Class\).* --import"):
        timm.create_model("gauvit_pico_patch2_8", attention="mine")
    gaupipe.register("mine", Residual)
    own = timm.create_model("gauvit_pico_patch2_8", attention="mine").eval()
    standard = timm.create_model("gauvit_pico_patch2_8", attention="standard").eval()
    image = torch.rand(1, own.patch_embed.proj.in_channels, 8, 8)
    standard.load_state_dict(own.state_dict(), strict=False)
    assert isinstance(own.blocks[0].attn, Residual)
    assert not torch.allclose(own(image), standard(image))
    for name, what in (("belief", Residual), ("Mine", Residual), ("other", torch.nn.Linear)):
        with pytest.raises(UserError, match=f"register '{name}'"):
            gaupipe.register(name, what)
