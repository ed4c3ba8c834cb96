"""An attention of the user's own, without a fork."""

import json
import sys

import pytest
import timm
import torch
from timm.models import vision_transformer

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


@pytest.fixture
def apart(in_process, tmp_path):
    """Runs a command as ``in_process`` does, and forgets what it registers."""

    def call(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ATTENTION, "data", {**ATTENTION.data})
            patch.setattr(vision_transformer, "ATTN_LAYERS", {**vision_transformer.ATTN_LAYERS})
            patch.setitem(sys.modules, "mine", None)
            return in_process(*arguments, cwd=tmp_path)

    return call


def test_an_imported_attention_is_trained_and_its_folder_says_what_is_missing(apart, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    mine = ("--import", "mine.py")
    settings = sets(*tiny(100, 50, 2), "train.epochs=1")
    code, _, err = apart(*mine, "train", "--student", "Residual", *settings)
    assert code == 0, err
    student = tmp_path / "runs/digits/plain/residual/student"
    assert "residual" in json.dumps(json.loads((student / "config.json").read_text()))
    code, _, err = apart(*mine, "evaluate", "--json")
    assert code == 0, err
    code, _, err = apart("evaluate")
    assert code == 2 and "residual" in err.splitlines()[-1]


@pytest.mark.parametrize("where", ["combine", "<module>"])
def test_debug_shows_where_an_imported_file_failed(apart, tmp_path, monkeypatch, where):
    """Whose mistake an error is, a program cannot know: without --debug it is one line."""
    monkeypatch.setenv("GAUPIPE_DEBUG", "")
    reads = 'open("absent.json")'
    if where == "combine":
        failing = MINE.replace("return", f"{reads}; return")
    else:
        failing = f"{MINE}\n{reads}"
    (tmp_path / "mine.py").write_text(failing)
    train = ["train", "--student", "residual", *sets(*tiny(100, 50, 1))]
    for option in ((), ("--debug",)):
        run = f"run{len(option)}"
        code, _, err = apart("--import", "mine.py", *option, *train, "--run-dir", run)
        assert code == 2 and "absent.json" in err.splitlines()[-1]
        assert (f"in {where}\n" in err) == ("Traceback" in err) == bool(option)


@pytest.mark.long
def test_the_processes_of_a_comparison_know_an_imported_attention(apart, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    settings = sets(*tiny(100, 50, 1, depth=1))
    rows = ("--seeds", 0, "--row", "plain ViT, residual", "--jobs", 2)
    compare = ("--import", "mine.py", "compare", "--students", "residual", *rows, "--json")
    code, out, err = apart(*compare, *settings)
    assert code == 0, err
    rows = json.loads(out)["rows"]
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
    gaupipe.register("mine", Residual)  # as a notebook's cell that runs again

    class WithoutHeads(StudentAttention):
        def __init__(self, dim):
            super().__init__(dim, 1)

    for name, what in (
        ("belief", Residual),
        ("Mine", Residual),
        ("other", torch.nn.Linear),
        ("local", Residual),
        ("resnet", Residual),
        ("mine", ATTENTION["xsa"]),
        ("other", WithoutHeads),
    ):
        with pytest.raises(UserError, match=f"register '{name}'"):
            gaupipe.register(name, what)
