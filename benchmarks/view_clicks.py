"""Time from a click in `gaupipe view --model` to its picture, the processor's part of it, and the
server's memory.

    python benchmarks/view_clicks.py local-dir:MODEL PHOTOS --rounds 3
    python benchmarks/view_clicks.py vit_base_patch16_224 PHOTOS --random-weights

Every round starts a server, opens its page in a Chromium, clicks, and moves the pointer over the
photo. A line for each has the median and the range in milliseconds, of the clock and of the
processor, in server and browser until the picture is there; the clock of a move is that of the
page's own work. The memory is the most that was resident, once the first page is there and when
all photos have been predicted, for which every click waits. Server and browser have one thread for
tensors; the clock also counts what else runs on the machine, and what the page fetches ahead after
a click is not counted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, sync_playwright
from timing import record, resident

START = "from the command to its address"
OPEN = "from the address to the first picture"
TICKS = os.sysconf("SC_CLK_TCK")
CLICK = """async ([selector, title]) => {
  const target = document.querySelector(selector);
  const before = document.querySelector("#title").textContent;
  const frame = () => new Promise(requestAnimationFrame);
  const there = () => !title || document.querySelector("#title").textContent !== before;
  const started = performance.now();
  target.click();
  while (!there() || document.querySelector("#stage").ariaBusy) {
    await new Promise((done) => setTimeout(done, 4));
  }
  await frame();
  await frame();  // which begins when the picture of the one before has been drawn
  return performance.now() - started;
}"""
HOVER = """async (moves) => {
  const canvas = document.querySelector("#panes canvas");
  const { left, top, width, height } = canvas.getBoundingClientRect();
  const frame = () => new Promise(requestAnimationFrame);
  const move = (type, x, y) => {
    const place = { clientX: left + x * width, clientY: top + y * height };
    canvas.dispatchEvent(new PointerEvent(type, { pointerType: "mouse", ...place }));
  };
  let worked = 0;
  for (let i = 0; i < moves; i++) {
    const started = performance.now();
    move("pointermove", (i + 0.5) / moves, 0.5);
    worked += performance.now() - started;
    await frame();
    await frame();
  }
  move("pointerleave", 0, 0);
  return worked;
}"""
MOVE = "the pointer over a patch"
MOVES = 14
"""Over as many patches of a row, where a row has so many."""
CLICKS = {
    "the next image": ("#image-on", True),
    "a far thumbnail": (".thumb:nth-child({far})", True),
    "a cell": (".cell[data-layer='{layer}'][data-head='1']", False),
    "all patches": ("#tokens [data-query=mean]", False),
    "class token": ("#tokens [data-query=x0]", False),
    "is read by": ("[data-direction=to]", False),
    "reads": ("[data-direction=from]", False),
    "the gradient": (".cell[data-layer='{layer}'][data-head=gradient]", False),
}
"""In this order: the next image is asked for when those beside have been fetched."""


def processor() -> float:
    """Milliseconds of the processor that all descendants of this process have used."""
    parents, used = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        process = int(stat.parent.name)
        parents[process] = int(fields[1])
        used[process] = 1000 * (int(fields[11]) + int(fields[12])) / TICKS

    def is_ours(process: int) -> bool:
        while process in parents and process != os.getpid():
            process = parents[process]
        return process == os.getpid()

    return sum(used[process] for process in used if process != os.getpid() and is_ours(process))


def wait_until_idle() -> None:
    """Until server and browser have nothing left to do, as what is fetched ahead."""
    before = -1000.0
    while (now := processor()) - before > 20:
        before = now
        time.sleep(0.4)


def timed(act: Callable[[], float]) -> tuple[float, float]:
    """Milliseconds of the clock, which ``act`` returns, and of the processor."""
    before = processor()
    clock = act()
    return clock, processor() - before


def one_round(
    arguments: argparse.Namespace,
    times: dict[str, list[tuple[float, float]]],
    memory: dict[str, list[float]],
) -> None:
    command = [sys.executable, "-m", "gaupipe", "view", "--no-open", "--model", arguments.model]
    command += ["--images", str(arguments.images)] + ["--random-weights"] * arguments.random_weights
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(120_000)
        server = None
        address = ""

        def start() -> float:
            nonlocal server, address
            started = time.perf_counter()
            server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None
            address = server.stdout.readline().split()[0]
            return 1000 * (time.perf_counter() - started)

        def open_page() -> float:
            started = time.perf_counter()
            page.goto(address)
            page.wait_for_selector("html[data-ready]")
            return 1000 * (time.perf_counter() - started)

        try:
            times[START].append(timed(start))
            times[OPEN].append(timed(open_page))
            memory["once the first page is there"].append(resident("VmHWM", server.pid) / 1000)
            for turn in range(arguments.clicks):
                click_all(page, turn, times)
                wait_until_idle()
                clock, used = timed(lambda: page.evaluate(HOVER, MOVES))
                times[MOVE].append((clock / MOVES, used / MOVES))
            wait_until_idle()
            memory["at its end"].append(resident("VmHWM", server.pid) / 1000)
        finally:
            browser.close()
            if server:
                server.terminate()
                server.wait()


def click_all(page: Page, turn: int, times: dict[str, list[tuple[float, float]]]) -> None:
    for name, (selector, title) in CLICKS.items():
        wait_until_idle()
        chosen = selector.format(far=20 + 9 * turn, layer=3 + turn % 8)
        times[name].append(timed(lambda: page.evaluate(CLICK, [chosen, title])))  # noqa: B023


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="as `gaupipe view --model` takes it")
    parser.add_argument("images", type=Path, help="a folder with 60 photos or more")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clicks", type=int, default=3, help="of each kind in a round")
    parser.add_argument("--random-weights", action="store_true")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    names = (START, OPEN, *CLICKS, MOVE)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    memory: dict[str, list[float]] = {"once the first page is there": [], "at its end": []}
    for _ in range(arguments.rounds):
        one_round(arguments, times, memory)
    for name, measured in times.items():
        if not measured:
            continue  # no clicks
        said = []
        for measure, values in zip(
            ("clock", "processor"), zip(*measured, strict=True), strict=True
        ):
            record(f"view, {name}, {measure}, ms", values)
            median = statistics.median(values)
            said.append(f"{measure} {median:.0f} [{min(values):.0f}, {max(values):.0f}]")
        print(f"{name}: {', '.join(said)} ms, {len(measured)} times", file=sys.stderr)
    for when, peaks in memory.items():
        record(f"view, memory {when}, MB", peaks)
        print(f"memory {when}: {max(peaks):.0f} MB", file=sys.stderr)


if __name__ == "__main__":
    main()
