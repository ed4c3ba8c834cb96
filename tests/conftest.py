"""One thread a test process: the models are tiny, and threads that wait for each other cost more
than they bring."""

import functools
import gc
import importlib
import importlib.util
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

import gaupipe  # noqa: F401  (before the command line, which would leave torch for later)
from gaupipe.system.messages import show_messages
from pictures import write_idx
from runs import run_main
from storage import CREDENTIALS, s3_server

show_messages()  # as the command line does, for tests that call stages
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that begin after this one

gc.disable()  # while tests are collected: it would take a fifth of that time and find nothing


def pytest_collection_finish():
    """Keeps the garbage collector from what stays: the modules and the tests."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish():
    gc.unfreeze()  # libraries look for what leaks as the process ends


# Processes inherit from what starts the tests that a signal is ignored or blocked (a shell's
# background jobs ignore SIGINT), and gaupipe leaves ignored signals ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


CORE = {
    *("test_attention", "test_gaussians", "test_gaussian_moves", "test_maps", "test_losses"),
    *("test_buckets", "test_training", "test_image_state", "test_initialisation", "test_config"),
    "test_structure",
}
"""Files of the tests that ``-m core`` runs: the equations, a step, the settings, the rooms."""


def pytest_ignore_collect(collection_path, config):
    """Other files are not imported for ``-m core``, which would take longer than its tests."""
    if config.option.markexpr == "core" and collection_path.suffix == ".py":
        return collection_path.stem not in CORE or None


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem in CORE:
            item.add_marker("core")


@pytest.fixture(scope="session", autouse=True)
def machine(tmp_path_factory):
    """Stands in for what commands would find on the machine: a folder with 'cache' and
    'fashion-mnist', 300 images of 8 x 8 pixels and 50 to test."""
    folder = tmp_path_factory.mktemp("machine")
    (folder / "fashion-mnist").mkdir()
    draw = np.random.default_rng(0)
    for prefix, count in (("train", 300), ("t10k", 50)):
        images = draw.integers(256, size=(count, 8, 8), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        write_idx(folder / "fashion-mnist" / f"{prefix}-images-idx3-ubyte.gz", images)
        write_idx(folder / "fashion-mnist" / f"{prefix}-labels-idx1-ubyte.gz", labels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GAUPIPE_FASHION_MNIST", str(folder / "fashion-mnist"))
        patch.setenv("GAUPIPE_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def parsers():
    """Makes the command line's parsers once: a process needs them once, and they hold no state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def quick():
    """Leaves out the figure of each training, half a second of a processor, which a test of it
    brings back; and measures a step where a plan would measure a second of steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.runs.timing.MEASURED", 0.0)
        patch.setattr("gaupipe.training.epochs.draw", lambda trainings, path: None)
        yield


@pytest.fixture(scope="session")
def small_run(tmp_path_factory) -> Path:
    """A run of 40 digits whose stages have all finished, with a Gaussian teacher, a store of
    several shards and the student ``standard``. To be copied, not changed."""
    from exports import write_store
    from gaupipe.settings.load import load
    from stages import phase_a, phase_b

    small = ["data.train_images=40", "phase_a.max_epochs=1", "train.epochs=1", "threads=1"]
    model = "model.args={embed_dim: 16, depth: 1, num_heads: 2}"
    run_dir = tmp_path_factory.mktemp("finished") / "before"
    phase_a.run(load("digits_expected", [*small, model]), run_dir)
    write_store(run_dir, shard_mb=0.006)
    phase_b.run(run_dir, "standard")
    return run_dir.rename(run_dir.with_name("run"))  # what the student learned from has moved


@pytest.fixture
def copied_run(small_run, tmp_path):
    """Copies :func:`small_run`; a test may write to the copy's files."""
    return lambda name="run": Path(shutil.copytree(small_run, tmp_path / name))


@pytest.fixture
def run(copied_run) -> Path:
    return copied_run()


@pytest.fixture
def in_process(capfd):
    """Runs a command in this process: (exit code, stdout, stderr without the lines that say what
    begins)."""

    def call(*arguments, cwd=None) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run_main(*arguments, cwd=cwd)
        out, err = capfd.readouterr()
        lines = err.splitlines(keepends=True)
        return code, out, "".join(line for line in lines if not line.endswith(" ...\n"))

    return call


@pytest.fixture
def example(monkeypatch):
    """Imports a script of examples/ by name; its ``main`` then runs with given arguments."""

    def load(name):
        monkeypatch.syspath_prepend(Path(__file__).parent.parent / "examples")
        module = importlib.import_module(name)

        def run(*arguments):
            monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
            module.main()

        return module, run

    return load


@pytest.fixture
def script(monkeypatch):
    """Imports a file by its path in the repository."""

    def load(path):
        path = Path(__file__).parent.parent / path
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)  # a dataclass of it looks itself up
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="module")
def browser():
    """Debian's chromium, driven by Playwright; a test is skipped without either."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright (test extra) is not installed"
    )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Address of an S3 server with a bucket ``maps``."""
    with s3_server(tmp_path_factory.mktemp("s3")) as address:
        yield address


@pytest.fixture
def s3(server, monkeypatch):
    """The URL of the bucket, with the server's credentials in the environment."""
    given = {**CREDENTIALS, "AWS_ENDPOINT_URL": server, "AWS_REGION": "us-east-1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return "s3://maps"
