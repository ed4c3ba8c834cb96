"""Lines on a terminal of 80 columns: what can be copied stays in one piece."""

import io
import logging
import re
import shlex
import subprocess
from pathlib import Path

from rich.console import Console

from gaupipe.system import distributed, progress
from gaupipe.system.messages import LOG, shared_console
from gaupipe.system.progress import EpochProgress
from gaupipe.system.terminal import aligned, wrap

ROOT = Path(__file__).parent.parent
COMMAND = "gaupipe phase-b --run-dir runs/a-folder --name another-student --no-distill"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_words_paths_and_commands_are_not_broken(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = "/a/path/" + "of-words-with-hyphens/" * 5
    words = f"gaupipe: {path} is not there, and what trains a student is '{COMMAND}' here"
    lines = wrap(words, Terminal()).splitlines()
    assert len(lines) > 2 and " ".join(map(str.strip, lines)) == words
    assert any(path in line for line in lines) and any(COMMAND in line for line in lines)
    assert all(len(line) <= 80 or path in line for line in lines)


def test_the_command_that_follows_can_be_copied(monkeypatch):
    words = [*shlex.split(COMMAND), "--maps", "a folder/maps.zarr"]
    said = wrap("gaupipe: next:", io.StringIO(), words)
    assert said == f"gaupipe: next: {COMMAND} --maps 'a folder/maps.zarr'"
    monkeypatch.setenv("COLUMNS", "60")
    first, *typed = wrap("gaupipe: next:", Terminal(), words).splitlines()
    assert first == "gaupipe: next:" and len(typed) == 3 and max(map(len, typed)) <= 60
    shell = ["sh", "-c", "\n".join(["printf '%s\n' \\", *typed])]  # takes it as it stands
    assert subprocess.run(shell, text=True, capture_output=True).stdout.splitlines() == words


def test_a_path_that_does_not_fit_a_table_is_a_line_of_its_own(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    rows = [("class", "image"), ("hat", "photos/a.jpg"), ("猫", "photos/b.jpg")]
    assert aligned(rows, Terminal()) == [
        "class  image",
        "hat    photos/a.jpg",
        "猫     photos/b.jpg",  # two columns wide
    ]
    rows.append(("hat", f"photos/{40 * 'x'}.jpg"))
    assert aligned(rows, Terminal())[-2:] == ["hat", f"  {rows[-1][1]}"]
    assert aligned(rows, io.StringIO())[-1] == f"hat    {rows[-1][1]}"


def test_brackets_in_a_path_are_no_markup_and_other_ranks_say_nothing(monkeypatch, capsys):
    shared_console.cache_clear()
    LOG.info("into runs/[bold]x[/bold]")
    monkeypatch.setattr(distributed, "launch", lambda: distributed.Launch(1, 2, 1, 2))
    LOG.warning("of rank 1")
    shared_console.cache_clear()
    assert capsys.readouterr().err == "into runs/[bold]x[/bold]\n"


BEFORE_COMMANDS = ROOT / "stages/cli/__init__.py"


def test_lines_for_a_terminal_are_printed_in_one_place():
    """Only there are they broken between words."""
    for folder in ("gaupipe", "stages"):
        for path in (ROOT / folder).rglob("*.py"):
            prints = re.findall(r"print\((?!WAITS|\" \").*file=sys.stderr", path.read_text())
            # why a rank ends is said by itself: what handles messages may be gone; and what ends
            # a command before it begins, since nothing handles them yet
            assert not prints or path.name == "distributed.py" or path == BEFORE_COMMANDS, path


def test_a_bar_inside_another_one_is_gone_when_it_ends(monkeypatch):
    """Images are decoded while the bar of a training stands."""
    terminal = Terminal()
    console = Console(file=terminal, force_terminal=True, highlight=False, width=80, height=24)
    monkeypatch.setattr(progress, "shared_console", lambda: console)
    with EpochProgress("training", 10, 1) as training:
        with EpochProgress("decoding", 10, 1) as decoding:
            decoding.advance(10)
            training._bar.refresh()
        assert "decoding" in terminal.getvalue()
        training._bar.refresh()
        before = len(terminal.getvalue())
        console.print("said")
    after = terminal.getvalue()[before:]
    assert "said" in after and "training" in after and "decoding" not in after
    assert not re.search("training[^\n]*decoding", terminal.getvalue())


def test_of_many_epochs_a_terminal_keeps_ten(monkeypatch):
    terminal = Terminal()
    console = Console(file=terminal, force_terminal=True, highlight=False, width=80, height=24)
    monkeypatch.setattr(progress, "shared_console", lambda: console)
    with EpochProgress("xsa", 10, 48) as job:
        for number in range(48):
            job.epoch(number + 1, {"val": f"{number}.0 %", "time": "0.1 s"})
        assert [line.plain for line in job._bar.get_renderables() if hasattr(line, "plain")] == [
            "xsa epoch 48/48: val 47.0 %, time 0.1 s"
        ]
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", terminal.getvalue()).splitlines()
    start = lines.index("epoch     val   time")
    assert lines[start + 1] == "    1   0.0 %  0.1 s"
    assert lines[-1] == "   48  47.0 %  0.1 s" and len(lines) == start + 11


def test_the_library_says_only_warnings_unless_it_is_asked(monkeypatch, capfd, caplog):
    """As in a program of a user, which has no handler of the command line."""
    monkeypatch.setattr(LOG, "handlers", [])
    monkeypatch.setattr(LOG, "propagate", False)
    monkeypatch.setattr(LOG, "level", logging.NOTSET)
    with EpochProgress("xsa", 10, 1) as job:
        job.epoch(1, {"val": "50.0 %"})
    assert capfd.readouterr() == ("", "")
    LOG.warning("left out")
    assert capfd.readouterr() == ("", "left out\n")
    monkeypatch.setattr(LOG, "propagate", True)
    with caplog.at_level(logging.INFO, "gaupipe"):
        job.epoch(1, {"val": "50.0 %"})
    assert caplog.messages == ["xsa epoch 1/1: val 50.0 %"]
