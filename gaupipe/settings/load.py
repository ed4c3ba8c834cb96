"""Settings from YAML files, from the configurations that gaupipe ships, and from
``--set a.b=c``."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from gaupipe.settings import Settings, TrainSettings, scope
from gaupipe.settings.sections import LOCAL, Scope, fields_of, problem, with_whole_path
from gaupipe.system.errors import UserError

Tree = dict[str, Any]
"""Settings as YAML nests them, {"a": {"b": value}}."""
ByName = dict[str, Any]
"""Settings as the command line names them, {"a.b": value}, as JSON values."""
Overrides = str | Sequence[str] | ByName
"""Changes of settings in their order: values by name, or one or more texts ``a.b=value``, the value
in YAML."""

PACKAGE = Path(__file__).parents[1]
SHIPPED = PACKAGE / "configs"
"""The folder of the configurations: inside an installed package, beside the package in a clone."""
if not SHIPPED.is_dir():
    SHIPPED = PACKAGE.parent / "configs"


def load(source: str | Path, overrides: Overrides = ()) -> Settings:
    """Settings from a YAML file, or from the configuration of this name that gaupipe ships, with
    ``overrides``. Raises UserError with one line for whatever is wrong."""
    tree = read_yaml(source)
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise UserError(
            f"{source}: should hold settings such as 'seed: 0', found {type(tree).__name__}"
        )
    merged = with_overrides(_for_model(tree, with_overrides({}, overrides)), overrides)
    try:
        return parse(merged, str(source))
    except UserError:
        parse(tree, str(source))  # a mistake of the file's own
        return parse(merged)


def _for_model(tree: Tree, given: Tree) -> Tree:
    """A copy of a file's settings, without its attention where the settings ``given`` by a command
    name trained weights, which then keep theirs, but no attention."""
    tree = copy.deepcopy(tree)
    model = tree.get("model")
    named = given.get("model")
    if not (isinstance(model, dict) and isinstance(named, dict)):
        return tree
    trained = not str(named.get("name", "gauvit_")).startswith("gauvit_")
    if trained and "attention" not in named:
        for setting in ("attention", "attention_options"):
            model.pop(setting, None)
    return tree


def read_overrides(overrides: Overrides) -> ByName:
    """A copy of changes by name. Raises UserError for a text that is no such change."""
    if isinstance(overrides, dict):
        return dict(overrides)
    if isinstance(overrides, str):
        overrides = [overrides]
    changes: ByName = {}
    for override in overrides:
        name, value = _read(override)
        changes.pop(name, None)  # "a.b" after "a" is another change than before it
        changes[name] = value
    return changes


def with_overrides(tree: Tree, overrides: Overrides) -> Tree:
    """A nested dict of settings with these changes. What is set in ``train`` holds for ``phase_b``
    too, unless set there. Raises UserError for a change of what is no section."""
    changes = read_overrides(overrides)
    _forget_in_phase_b(tree, changes)
    for name, value in changes.items():
        # a copy, because a later change may be one of a part of it
        set_value(tree, name, copy.deepcopy(value), name)
    return tree


def _forget_in_phase_b(tree: Tree, changes: ByName) -> None:
    """Takes out of ``phase_b`` what the changes set in ``train``. A file may give the student 8
    epochs and the baseline 12; but whoever then says ``--epochs 2`` means both, and which was said
    later is no longer known once the two are merged."""
    for change, value in changes.items():
        for name, _ in leaves(value, change):
            section, *setting = name.split(".")[:3]  # keywords in optim.args are one setting
            if section != "train" or not setting:
                continue
            inside: Any = tree
            for part in ("phase_b", *setting[:-1]):
                inside = inside.get(part) if isinstance(inside, dict) else None
            if isinstance(inside, dict):
                inside.pop(setting[-1], None)


def load_merged(source: str | Path, overrides: Overrides) -> Settings:
    """As :func:`load`, but keywords such as those of ``model.args`` join the file's."""
    tree = read_yaml(source)
    changes = read_overrides(overrides)
    _forget_in_phase_b(tree, changes)
    return parse(_merged(tree, with_overrides({}, changes)))


def _merged(tree: Tree, changes: Tree) -> Tree:
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(tree.get(name), dict)
        tree[name] = _merged(tree[name], value) if both else value
    return tree


def parse(tree: Tree, where: str | None = None) -> Settings:
    """Validates a nested dict of settings. Trained weights keep their attention, unless
    ``model.attention`` names another one. Raises UserError, which says ``where`` the settings
    stand, if not in the user's command or call."""
    model = tree.get("model")
    if isinstance(model, dict) and "attention" not in model:
        name = str(model.get("name", ""))
        if name and not name.startswith("gauvit_"):
            tree = {**tree, "model": _attention_of_weights(name) | model}
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        said = problem(error, Settings)
        raise UserError(f"{where}: {said}" if where else said) from None


def _attention_of_weights(name: str) -> Tree:
    """``attention`` and ``attention_options`` of trained weights, as the config.json of a
    ``local-dir:`` says; any other weights have standard attention."""
    own = {}
    if name.startswith(LOCAL):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            config = Path(with_whole_path(name).removeprefix(LOCAL)) / "config.json"
            own = json.loads(config.read_bytes())["model_args"]
    options = own.get("attention_options") or {}
    return {"attention": own.get("attention", "standard"), "attention_options": options}


def dump(settings: Settings) -> str:
    """The resolved settings as YAML; ``load`` of it gives the same settings."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def flatten(settings: Settings, *without: Scope) -> ByName:
    """All settings, but for those of the scopes ``without``."""
    every = leaves(settings.model_dump(mode="json"), "")
    return {name: value for name, value in every if scope(name) not in without}


def with_anytime(settings: Settings, now: Settings) -> Settings:
    """The settings, but for those that may change at any time, which are as in ``now``."""
    tree = settings.model_dump(mode="json")
    for name, value in flatten(now, Scope.RUN, Scope.STUDENT).items():
        set_value(tree, name, value, name)
    return Settings.model_validate(tree)


def check_as_begun(
    place: object,
    before: dict[str, object],
    now: dict[str, object],
    afresh: str = "in another --run-dir",
) -> None:
    """Raises UserError for the first of some named values with which a ``place``, a folder, was
    started, and which is another one now. ``afresh`` says where one may start again."""
    # a name that one of them lacks follows from another value, as data.scaling from the teacher
    for name in sorted(before | now, key=lambda name: name not in before or name not in now):
        old = before.get(name)
        new = now.get(name)
        if old != new:
            raise UserError(
                f"{place} was started with {name} {old}, now it is {new}: change it back, or start "
                f"afresh {afresh}"
            )


def changed(old: Settings, new: Settings, *without: Scope) -> list[str]:
    """Names of the settings in which two settings differ, but for those of the scopes
    ``without``."""
    before = flatten(old, *without)
    now = flatten(new, *without)
    return [name for name in before | now if before.get(name) != now.get(name)]


def leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The settings within ``tree``, which has this name, and their values."""
    if not isinstance(tree, dict) or not tree:
        yield name, tree
        return
    for key, branch in tree.items():
        yield from leaves(branch, f"{name}.{key}" if name else key)


def shipped(kind: str = "") -> list[str]:
    """Names of the configurations inside the package, or of what lies in a folder beside them:
    ``sweeps``."""
    return sorted(path.stem for path in (SHIPPED / kind).glob("*.yaml"))


def text_of(name: str) -> str:
    """The text of a configuration that is :func:`shipped`."""
    return (SHIPPED / f"{name}.yaml").read_text("utf-8")


def read_yaml(source: str | Path, kind: str = "") -> Any:
    """The value in a YAML file, or in the :func:`shipped` one of this name. Raises UserError."""
    path = Path(source)
    if not path.is_file():
        names = shipped(kind)
        if str(source) not in names:
            if path.is_dir() and not kind:
                raise UserError(f"{source}: is a folder; for your own images type --data {source}")
            close = get_close_matches(str(source), names, 1)
            right = f"did you mean {close[0]}?" if close else f"shipped are {', '.join(names)}"
            raise UserError(f"no file {str(source)!r}: give the path of a YAML file; {right}")
        path = SHIPPED / kind / f"{source}.yaml"
    try:
        return _parse_yaml(path.read_bytes().decode("utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{source}: not readable as YAML: {error}") from None


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        mapping = super().construct_mapping(node, deep)
        seen = set()
        for key, _ in node.value if len(mapping) < len(node.value) else ():
            name = self.construct_object(key, deep=True)
            if name in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {name!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(name)
        return mapping


def _parse_yaml(text: str) -> Any:
    """The value that a YAML text stands for. Raises ValueError, in one line, where it is none."""
    try:
        value = yaml.load(text, _StrictLoader)
        json.dumps(value, default=str)  # refuses a list inside itself
        return value
    except Exception as error:  # the constructors of yaml raise whatever a value makes them raise
        raise ValueError(" ".join(str(error).split())) from None


def _read(override: str) -> tuple[str, Any]:
    """The name and the value of a text ``a.b=value``."""
    where = f"setting {override!r}"
    if len(override) >= 200:
        where = f"setting '{override[:200]}...'"
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"{where}: should look like train.epochs=20")
    try:
        value = _parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{where}: not a YAML value: {error!s:.300}") from None
    if _is_text(key):
        if not isinstance(value, str | list | dict | None):  # a folder may be called 2024
            value = text.strip()
    elif isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
        with contextlib.suppress(ValueError):
            value = float(value)
    return key, value


def _is_text(key: str) -> bool:
    """True if the setting "a.b" is a text or a path, or none."""
    *parents, leaf = key.split(".")
    try:
        annotation: Any = fields_of(Settings, parents)[leaf].annotation
    except KeyError:
        return False
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return str in kinds or Path in kinds


def set_value(tree: Tree, key: str, value: Any, where: str) -> None:
    """Sets "a.b" in a nested dict. Raises UserError, naming ``where``, if "a" is a value."""
    *parents, leaf = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise UserError(f"{where}: {parent!r} is a value, not a section")
    tree[leaf] = value


def check_plain(names: Iterable[str], where: str = "") -> None:
    """Raises UserError for a name "phase_b.b" by which a training without a teacher would have to
    be told how to train: it does not read ``phase_b``."""
    for name in names:
        section, _, field = name.partition(".")
        if section == "phase_b" and field.partition(".")[0] in TrainSettings.model_fields:
            raise UserError(
                f"{where}{name}: phase_b is for students with a teacher, and this one has none: "
                f"set train.{field}"
            )
