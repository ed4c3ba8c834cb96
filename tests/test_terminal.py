"""Lines on a terminal of 80 columns: what can be copied stays in one piece."""

import io

from rich.console import Console

from gaupipe.system import progress
from gaupipe.system.progress import EpochProgress
from gaupipe.system.terminal import fitted

COMMAND = "gaupipe phase-b --run-dir runs/a-folder --name another-student --no-distill"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_words_paths_and_commands_are_not_broken(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = "/a/path/" + "of-words-with-hyphens/" * 5
    words = f"gaupipe: {path} is not there, and what trains a student is '{COMMAND}' here"
    lines = fitted(words, Terminal()).splitlines()
    assert len(lines) > 2 and " ".join(map(str.strip, lines)) == words
    assert any(path in line for line in lines) and any(COMMAND in line for line in lines)
    assert all(len(line) <= 80 or path in line for line in lines)


def test_the_command_that_follows_is_a_line_of_its_own():
    assert fitted("gaupipe: next:", Terminal(), COMMAND).splitlines()[1].strip() == COMMAND
    assert fitted("gaupipe: next:", io.StringIO(), COMMAND) == f"gaupipe: next: {COMMAND}"


def test_of_many_epochs_a_terminal_keeps_ten(monkeypatch):
    terminal = Terminal()
    console = Console(file=terminal, force_terminal=True, highlight=False, width=80, height=24)
    with EpochProgress("xsa", 10, 48) as job:
        job._bar.stop() if job._bar else None
        job.console = console
        job._bar = progress.Bar(console=console, transient=True)
        for number in range(48):
            job.epoch(number + 1, {"val": f"{number}.0 %", "time": "0.1 s"})
        assert [line.plain for line in job._bar.get_renderables() if hasattr(line, "plain")] == [
            "xsa epoch 48/48: val 47.0 %, time 0.1 s"
        ]
    lines = terminal.getvalue().splitlines()
    start = lines.index("epoch     val   time")
    assert lines[start + 1] == "    1   0.0 %  0.1 s"
    assert lines[-1] == "   48  47.0 %  0.1 s" and len(lines) == start + 11
