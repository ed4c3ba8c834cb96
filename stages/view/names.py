"""By which names the images of a page are found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from gaupipe.data.images import FileImages
from gaupipe.data.splits import ImageData
from gaupipe.system.errors import UserError
from gaupipe.system.files import utf8


def ending(path: str) -> str:
    """The last two names of a path or URL: pages are sent to others."""
    return "/".join([name for name in path.split("/") if name][-2:])


class Names:
    """The names of a data set's images; found out when a split is first asked for."""

    def __init__(self, data: ImageData) -> None:
        self.data = data
        self._unique: dict[str, list[str | None]] = {}

    def unique(self, split: str) -> list[str | None]:
        """The name by which each image is found again: that of its file or, where several are
        called so, with its folder; None of an image that has neither for itself."""
        if split not in self._unique:
            images = self.data.split(split)
            names: list[str | None] = [None] * len(images)
            if isinstance(images.source, FileImages):
                paths = [utf8(images.path(image)) for image in range(len(images))]
                for form in (ending, lambda path: Path(path).name):  # the shorter where it will do
                    called = [form(path) for path in paths]
                    counts = Counter(called)
                    for image, name in enumerate(called):
                        if counts[name] == 1:
                            names[image] = name
            self._unique[split] = names
        return self._unique[split]

    def title(self, image: int, split: str) -> str | None:
        """The name of an image's file, with its folder where that tells it from others; None of an
        image without one."""
        return self.unique(split)[image] or self._of_file(image, split)

    def find(self, text: str, split: str) -> int:
        """The image that a file's name stands for; of several that are called so the first. Raises
        UserError where there is none."""
        names = self.unique(split)
        files = (self._of_file(image, split) for image in range(len(names)))
        for called in (names, files):
            for image, name in enumerate(called):
                if text == name:
                    return image
        raise UserError(f"{text}: no image here is called so")

    def _of_file(self, image: int, split: str) -> str | None:
        images = self.data.split(split)
        if isinstance(images.source, FileImages):
            return utf8(Path(images.path(image)).name)
        return None
