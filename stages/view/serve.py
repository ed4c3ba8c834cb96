"""View: a store's attention maps in a browser."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import urllib.parse
import webbrowser
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import store
from gaupipe.data.prepared import folder_labels
from gaupipe.data.splits import ImageData
from gaupipe.system.errors import UserError
from gaupipe.system.imports import pip_install
from gaupipe.system.machine import share_one_heap
from gaupipe.system.messages import LOG
from gaupipe.teachers.files import FilesTeacher, images_of, open_model
from stages.look.live_maps import LiveMaps, StudentMaps
from stages.runs.directory import RunDirectory
from stages.view.names import ending
from stages.view.page import write_page
from stages.view.viewer import Load, Viewer

HOST = "127.0.0.1"
PORT = 8642
"""Taken unless another one is asked for, or it is in use."""


def run(
    url: str | None,
    run_dir: Path | None = None,
    *,
    students: list[str] | None = None,
    port: int | None = None,
    open_browser: bool = True,
    html: Path | None = None,
    images: list[int] | None = None,
    model: str | None = None,
    files: Sequence[Path] = (),
    download: bool = False,
    random_weights: bool = False,
    image_size: int | None = None,
    split: str | None = None,
) -> None:
    """Serves a page over a store until it is interrupted, or writes ``html``, a page of some
    ``images`` that needs no server.

    Without a ``url`` the store is that of the run; without a ``run_dir`` the run is the folder that
    the store is in, if that is one. ``students`` are all that the run has trained, or those named,
    of which the page opens with the first; of a run without a store the page shows these alone. It
    opens with the images of a ``split``: those of the store, else the validation images. With a
    ``model`` the page shows its attention on image ``files``
    (:func:`gaupipe.teachers.files.open_model`).
    """
    if images is None and html is not None:  # a page of no image would be empty
        images = [0]
    images = images or []

    if model is not None:
        teacher, note = open_model(model, files, download, image_size, True, random_weights)
        if note:
            LOG.warning(f"gaupipe: {note}")
        viewer = model_viewer(teacher, note)
    else:
        others = split in ("val", "test")  # of which a store has no maps
        viewer = open_viewer(url, run_dir, students, all_students=html is None or others)

    split = split or viewer.split
    for image in images or [0]:
        viewer.check(image, split=split)

    start: dict[str, object] = {}
    if images:
        start["image"] = images[0]
    if split != viewer.split:
        start["split"] = split
    if students:
        start["student"] = students[0]

    if html is not None:
        write_page(viewer, html, images, split, start)
        print(html)
        return
    serve(viewer, port, open_browser, start)


def model_viewer(teacher: FilesTeacher, note: str = "") -> Viewer:
    """The maps of a model on image files, to which others can be added. Folders that are called
    like classes label their images."""

    def labelled(data: ImageData) -> ImageData:
        paths = [Path(data.train.path(image)) for image in range(len(data.train))]
        data.train.source.labels = folder_labels(paths, data.class_names)
        return data

    def extend(files: list[Path]) -> ImageData:
        return labelled(images_of(teacher.images, teacher.data.num_classes, files=files))

    data = labelled(teacher.data)
    name = ending(teacher.network.name)
    models: dict[str, Load] = {name: lambda _: LiveMaps(name, teacher.network.model, data)}
    return Viewer(name, models, data=data, note=note, extend=extend)


def open_viewer(
    url: str | None,
    run_dir: Path | None,
    students: list[str] | None = None,
    all_students: bool = True,
) -> Viewer:
    """The store, and the students that can be chosen beside it: those named, else all or none. Of a
    run without stored maps the students alone, all of them or the last one."""
    directory = None if run_dir is None else RunDirectory(run_dir)
    if directory is not None:
        directory.settings()  # refuses a folder that is no run
    if url is None:
        assert directory is not None
        url = str(directory.maps)
    elif directory is None:  # the run in which the store lies, if there is one
        folder = store.local_folder(url)
        if folder is not None and RunDirectory(folder.parent).config.is_file():
            directory = RunDirectory(folder.parent)
    trained = []
    if directory is not None:  # of a name in both phases the one of phase B, and these last
        plain = directory.students(distilled=False)
        trained = [
            *(name for name in plain if not directory.is_distilled(name)),
            *directory.students(),
        ]
    for name in students or []:
        if directory is None:
            raise UserError(f"--student {name}: name the student's run with --run-dir")
        if name not in trained:
            others = f"there are {', '.join(trained)}" if trained else "there is none"
            raise UserError(
                f"--student {name}: {directory.path} has no such finished student; {others}"
            )
    if directory is None:
        return Viewer(url, {}, store.open(url))
    maps = None
    is_own = directory.is_store(url)
    if not (trained and is_own and not directory.maps.exists()):
        if is_own:
            directory.stored()
        maps = store.open(url)
        if trained and is_own and not maps.schema.has_maps:
            maps = None
    names: Sequence[str] = students or ()
    if not students and all_students:
        names = trained[::-1]  # the one trained last is shown first
    elif not students and maps is None:
        names = trained[-1:]
    models: dict[str, Load] = {name: partial(StudentMaps, directory, name) for name in names}
    if maps is not None:
        return Viewer(url, models, maps, students=list(models))
    data = StudentMaps(directory, names[0]).data
    return Viewer(str(directory.path), models, students=list(models), data=data, split="val")


def serve(viewer: Viewer, port: int | None, open_browser: bool, start: dict[str, object]) -> None:
    """Answers a browser on this machine until Ctrl-C."""
    try:
        import uvicorn

        from stages.view.app import make_app
    except ModuleNotFoundError as error:
        raise UserError(
            f"view: the package {error.name} is missing: {pip_install('view')}; --html works "
            "without"
        ) from None
    share_one_heap()
    listening = bound(port)
    viewer.command = shlex.join(["gaupipe", *sys.argv[1:]])
    address = f"http://{HOST}:{listening.getsockname()[1]}/{viewer.token}/"
    if start:
        address += "#" + urllib.parse.urlencode(start)
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(viewer),
            log_level="warning",
            timeout_graceful_shutdown=1,
            server_header=False,
        )
    )
    viewer.start()
    print(f"{address}  (Ctrl-C ends it)", flush=True)
    if open_browser and has_display():
        webbrowser.open(address)
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        return
    finally:
        listening.close()
        viewer.stop()


def bound(port: int | None) -> socket.socket:
    """A socket on a port of this machine alone. Raises UserError for a port that is in use."""
    wanted = PORT if port is None else port
    try:
        return socket.create_server((HOST, wanted))
    except OSError as error:
        if port is None:
            return socket.create_server((HOST, 0))
        reason = os.strerror(error.errno or 0)
        raise UserError(f"--port {port}: {reason}; choose another, or leave it out") from None


def has_display() -> bool:
    """True where a browser opens a window and does not take over the terminal."""
    return sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
