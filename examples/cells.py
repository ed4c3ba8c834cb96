"""What scripts of this folder share: results kept in files, means, mistakes in one line."""

import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gaupipe.system.errors import UserError, mistake_of
from gaupipe.system.files import write_whole


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Says a user's mistake in one line and ends the script with exit code 2; 130 after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; the same command continues, finished trainings stay", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        mistake = mistake_of(error)
        if mistake is None:
            raise
        print(f"{Path(sys.argv[0]).name}: {' '.join(mistake.split())}", file=sys.stderr)
        raise SystemExit(2) from None


def write_json(path: Path, content: Any) -> None:
    """Puts a JSON file in the place of ``path``, at no moment a part of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content))


def kept(path: Path, settings: dict, work: Callable[[], Any]) -> Any:
    """What ``path`` holds, else the result of ``work``, which is then kept there. Raises UserError
    for a file of other settings, and for one that holds something else."""
    if path.exists():
        try:
            known = json.loads(path.read_text())
            result, before = known["result"], known["settings"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is damaged: remove it, and it is made again") from None
        for name in sorted(before.keys() | settings.keys()):
            if before.get(name) != settings.get(name):
                raise UserError(
                    f"{path} is from other settings ({name} was {before.get(name)}, now it is "
                    f"{settings.get(name)}): choose another --out"
                )
        return result
    result = work()
    write_json(path, dict(settings=settings, result=result))
    return result


def mean_and_spread(values: list[float], digits: int = 4) -> str:
    """Mean ± standard deviation over seeds; empty where there are no values."""
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"
