"""A kind of store is added as CONTRIBUTING.md says: two classes, and every command takes it."""

import json

import numpy as np
import pytest

import store
from arguments import tiny
from gaupipe.distillation import kinds
from gaupipe.settings.load import load
from gaupipe.system.errors import UserError
from stages import phase_a
from stages.view.serve import open_viewer
from store.encoding import Weights
from store.kinds import ArraySpec

SETTINGS = [*tiny(60, 30, 1), "export.kind=headmean", "export.encoding=uint8"]


class HeadMean(store.Kind):
    """The mean of a block's maps over its heads."""

    name = "headmean"

    def arrays(self, sizes):
        numbers, names = Weights(), ("image", "layer", "query", "key")
        shape = (sizes.num_images, sizes.layers, sizes.tokens, sizes.tokens)
        return {"means": ArraySpec(shape, numbers.dtype, names, numbers)}


class HeadMeanKind(kinds.MapKind):
    name = "headmean"

    def arrays(self, attention, k, dtype):
        return {"means": attention.maps(dtype).mean(2)}

    def attention(self, schema, shared, stored):
        means = stored["means"].float()  # [B, L, T, T]
        means = means / means.sum(-1, keepdim=True)

        def rows(layer, tokens):
            mean = kinds.select_queries(means[:, layer, None], tokens)
            return mean.expand(-1, schema.heads, -1, -1)

        return kinds.StoredRows(rows, schema.grid)


def test_both_packages_know_the_same_kinds():
    assert list(store.KINDS) == sorted(kinds.MAP_KINDS, key=list(store.KINDS).index)
    for registry in (store.KINDS, kinds.MAP_KINDS):
        assert all(kind.name == name for name, kind in registry.items())


def test_a_kind_is_two_classes(tmp_path, monkeypatch, in_process):
    with pytest.raises(UserError, match="should be one of gaussian, .*, got 'headmean'"):
        load("digits_expected", SETTINGS)
    monkeypatch.setitem(store.KINDS, "headmean", HeadMean())
    monkeypatch.setitem(kinds.MAP_KINDS, "headmean", HeadMeanKind())
    run = tmp_path / "run"
    phase_a.run(load("digits_expected", SETTINGS), run)
    assert in_process("export-maps", "--run-dir", run)[0] == 0
    assert in_process("verify", run / "maps.zarr", "--teacher")[0] == 0
    gaussians = run / "gaussians.zarr"
    command = ("export-maps", "--run-dir", run, "--kind", "gaussian", "--encoding", "float16")
    assert in_process(*command, "--out", gaussians)[0] == 0
    assert in_process("phase-b", "--run-dir", run, "--student", "standard")[0] == 0
    assert in_process("view", run, "--html", "no.html")[0] == 2  # a folder that is no store

    chosen = ("--image", 7, "--layer", 1, "--json")
    shown, exact = (
        json.loads(in_process("inspect", url, *chosen)[1])["map"]
        for url in (run / "maps.zarr", gaussians)
    )
    np.testing.assert_allclose(shown, exact, atol=5e-3)
    summary = json.loads(in_process("inspect", run / "maps.zarr", "--json")[1])
    assert (summary["kind"], summary["arrays"]["means"]) == ("headmean", "[60, 2, 16, 16] uint8")
    message = open_viewer(str(run / "maps.zarr"), None).image(7)
    assert b'"maps": ["float32", [2, 4, 16, 16]' in message  # two heads, their mean, the rollout
