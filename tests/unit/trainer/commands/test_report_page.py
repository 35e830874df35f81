"""The page of a run: in a real browser, where there is one, with a run whose every text is hostile; and as a file."""

import http.client
import json
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.polling import wait_until
from tests.support.rows import read_rows, write_rows
from trainer.cli import main
from trainer.commands import report_page
from trainer.commands.report_page import LIMIT, curves, embedded, page, some_steps, visible
from trainer.commands.report_record import read_record
from trainer.commands.report_watch import make_server
from trainer.errors import UserError

HOSTILE = (
    "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 2'><!-- @@SCRIPT@@ "
    '<a href="javascript:window.owned = 3" onclick="window.owned = 4">\u202eback\u2066 '
    "\x00\x1b[31m\x7f\x85\ud800 & &lt;"
)
SHOWN = (
    "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 2'><!-- @@SCRIPT@@ "
    '<a href="javascript:window.owned = 3" onclick="window.owned = 4">�back� ␀␛[31m␡�� & &lt;'
)
STEPS = 12


def write_run(folder: Path, steps: int = STEPS, text: str = HOSTILE) -> Path:
    """Write a run in which every name and text is `text`."""
    folder.mkdir()
    rows = {"metrics": [], "completions": [], "tokens": []}  # type: dict[str, list[dict[str, Any]]]
    for step in range(1, steps + 1):
        figures = {
            "reward/mean": step / steps,
            "reward/std": 0.1,
            "gap/max": 1e-5 * step,
            "gap/mean": 1e-6,
        }
        figures |= {
            "time/rollout": 2.0,
            "time/update": 1.0,
            "time/step": 3.0,
            "memory/trainer_gib_update": 1.5,
        }
        rows["metrics"].append({"train/step": step} | figures | {f"reward/{text}": 0.5, "entropy": 2.0})
        answer = {
            "prompt_id": 7,
            "sample": 0,
            "prompt": text,
            "text": text,
            "answer": text,
            "reward": 0.5,
        }
        answer |= {
            "parts": {text: 0.5},
            "finish_reason": text,
            "tokens": 3,
            "weight_version": step,
            "error": text,
        }
        pieces = [[f"own {step} {text}", True], [f"a tool's {text}", False]]
        rows["completions"].append({"train/step": step} | answer | {"pieces": pieces})
        tokens = {"prompt_id": 7, "sample": 0, "reward": 0.5, "tokens": ["first", text, "last"]}
        figures = {
            "gap": [0.002, None, -0.001],
            "entropy": [0.5, None, 1.0],
            "advantage": [-1.5, None, -1.5],
        }
        rows["tokens"].append({"train/step": step} | tokens | figures)
    for name, lines in rows.items():
        write_rows(folder / f"{name}.jsonl", lines)
    recipe = {"run": {"name": text, "steps": steps}, "model": {"path": text}, "policy": {"lr": 3e-5}}
    (folder / "config.yaml").write_text(
        yaml.safe_dump(recipe) if text != HOSTILE else json.dumps(recipe)
    )
    return folder


class Browser:
    """Chromium, driven over WebDriver (https://www.w3.org/TR/webdriver2/)."""

    def __init__(self, place: Path) -> None:
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._driver.stdout is not None
        port = next(
            line.split()[-1].rstrip(".")
            for line in self._driver.stdout
            if "started successfully" in line
        )
        self._url = f"http://127.0.0.1:{port}"
        flags = [
            *(
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-sync",
            ),
            *(
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-dev-shm-usage",
            ),
            *("--window-size=1280,2600", f"--user-data-dir={place}"),
        ]
        wanted = {"goog:chromeOptions": {"args": flags}, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._url += f"/session/{answer['sessionId']}"

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def imitate(self, width: int, scheme: str) -> None:
        """Imitates a window of this width, and a reader who prefers this colour scheme."""
        size = {"width": width, "height": 2600, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", size)
        self.command(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )

    def command(self, name: str, parameters: dict[str, Any]) -> Any:
        """Give a command of the DevTools protocol (https://chromedevtools.github.io/devtools-protocol)."""
        return self._ask("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        """Return the value of the script."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": []})

    def wait(self, script: str, seconds: float = 30.0) -> None:
        """Wait until the script's value is true."""
        wait_until(lambda: self.run(script), seconds, lambda: f"not true in {seconds:.0f} s: {script}")

    def complaints(self) -> list[str]:
        """Return the console's messages since the last call, about errors and scripts that the page's policy has
        blocked.
        """
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def close(self) -> None:
        self._ask("DELETE", "")
        self._driver.terminate()
        self._driver.wait(20)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("no browser: on Debian, apt install chromium chromium-driver")
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "<b>mine & co")


def test_a_page_of_hostile_texts_shows_them_and_runs_none(browser: Browser, run: Path) -> None:
    write_run(other := run.parent / "other", text="plain")
    assert main(["report", str(run), str(other)]) == 0
    browser.open((run / "report.html").as_uri())
    browser.wait("return document.querySelectorAll('.js-plotly-plot .scatterlayer').length > 5")
    assert browser.run("return window.owned ?? null") is None
    assert (
        browser.run(
            "return document.querySelectorAll('img, main script, main a[href^=javascript]').length"
        )
        == 0
    )
    assert browser.complaints() == []  # neither an error nor anything that the policy had to stop
    buttons = browser.run(
        "return [...document.querySelectorAll('.modebar-btn')].map(each => each.dataset.title)"
    )
    # Nothing is sent anywhere
    assert "Zoom" in buttons and not [title for title in buttons if "hare" in title]
    assert browser.run("return document.title") == "<b>mine & co · Hotbunk"
    assert browser.run("return document.getElementById('name').textContent") == "<b>mine & co"
    answers = browser.run("return document.getElementById('texts').textContent")
    assert f"own {STEPS} {SHOWN}a tool's {SHOWN}" in answers and answers.count(SHOWN) == 7
    tools = browser.run(
        "return [...document.querySelectorAll('#texts pre .theirs')].map(each => each.textContent)"
    )
    assert tools == [f"a tool's {SHOWN}"]
    # As YAML
    assert f'run.name"{SHOWN[:80]}' in browser.run("return document.getElementById('keys').textContent")
    assert SHOWN in browser.run("return document.getElementById('figure').textContent")
    browser.run(
        f"const s = document.getElementById('figure'); s.value = {json.dumps(f'reward/{SHOWN}')}; "
        "s.dispatchEvent(new Event('change'))"
    )
    assert SHOWN in browser.run("return document.querySelector('#compare h3').textContent")
    assert browser.run("return window.owned ?? null") is None and browser.complaints() == []


def test_tokens_are_coloured_by_the_chosen_figure_for_every_step(browser: Browser, run: Path) -> None:
    (run / "report.html").write_text(page([read_record(run)]))
    browser.open((run / "report.html").as_uri())
    colours = "return [...document.querySelectorAll('#tokens .tokens span')].map(each => each.style.backgroundColor)"
    seen = {}
    for name in ("gap", "entropy", "advantage"):
        browser.run(
            f"const s = document.getElementById('colour'); s.value = '{name}'; "
            "s.dispatchEvent(new Event('change'))"
        )
        seen[name] = browser.run(colours)
    blue, red, orange = "rgba(59, 111, 182, ", "rgba(200, 80, 75, ", "rgba(224, 139, 43, "
    assert seen["gap"][0].startswith(blue) and seen["gap"][2].startswith(red)
    assert seen["advantage"][0].startswith(red) and seen["entropy"][0].startswith(orange[:10])
    assert {entry[1] for entry in seen.values()} == {""}  # a tool's token has no figures
    titles = browser.run(
        "return [...document.querySelectorAll('#tokens .tokens span')].map(each => each.title)"
    )
    assert titles == [
        "gap 0.002\nentropy 0.5\nadvantage -1.5",
        "",
        "gap -0.001\nentropy 1\nadvantage -1.5",
    ]
    browser.run(
        "const s = document.getElementById('step'); s.value = 4; s.dispatchEvent(new Event('change'))"
    )
    assert "own 4 " in browser.run("return document.getElementById('texts').textContent")
    assert browser.run(
        "return [...document.querySelectorAll('#phases td')].map(each => each.textContent)"
    )[:3] == [
        *("rollout", "24 s", "66.7%"),
    ]
    changed = "return [...document.querySelectorAll('#keys .changed td:first-child')].map(each => each.textContent)"
    assert set(browser.run(changed)) == {"run.name", "run.steps", "model.path", "policy.lr"}


BOXES = """
const box = (element) => { const r = element.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
const panels = [...document.querySelectorAll(".plot")].map((plot) => ({
  title: box(plot.parentElement.querySelector("h3")), plot: box(plot),
  name: plot.parentElement.querySelector("h3").textContent,
  curves: box(plot.querySelector(".nsewdrag")), axis: box(plot.querySelector(".xtitle")),
  legend: plot.querySelector(".legend") ? box(plot.querySelector(".legend")) : null,
  entries: [...plot.querySelectorAll(".legend .traces")].map(box),
}));
return {panels, width: document.documentElement.scrollWidth};
"""
LUMINANCE = """
const shade = (selector, property) => {
  const [r, g, b] = getComputedStyle(document.querySelector(selector))[property].match(/[\\d.]+/g).map(Number);
  return (0.3 * r + 0.6 * g + 0.1 * b) / 255;
};
return {
  page: shade("body", "backgroundColor"), card: shade("section", "backgroundColor"), ink: shade("body", "color"),
  label: shade(".xtitle", "fill"), legend: shade(".legendtext", "fill"), note: shade(".note", "color"),
};
"""


def overlap(one: list[float], other: list[float]) -> bool:
    """Return True if two boxes (left, top, right, bottom) have more than an edge in common."""
    across = min(one[2], other[2]) - max(one[0], other[0])
    down = min(one[3], other[3]) - max(one[1], other[1])
    return across > 1 and down > 1


def write_long_legends(folder: Path) -> Path:
    """Write a run whose phases and memory have as many curves as those of a run with critic and evaluation."""
    write_run(folder, text="plain")
    rows = read_rows(folder / "metrics.jsonl")
    phases = ("rollout", "sync", "sleep", "wake", "logprobs", "update", "eval", "checkpoint", "other")
    for row in rows:
        row |= {f"time/{phase}": 1.48e-5 for phase in phases} | {
            "gap/p95": 5e-6,
            "eval/accuracy": 0.5,
            "loss": 0.1,
        }
        sides = ("trainer", "engine")
        row |= {f"memory/{side}_gib_{phase}": 1.5 for side in sides for phase in phases[:6]}
    write_rows(folder / "metrics.jsonl", rows)
    answers = (folder / "completions.jsonl").read_text()
    (folder / "completions.jsonl").write_text(
        answers.replace('"reward": 0.5', '"reward": 0.8181818181818182')
    )
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [500, 900, 1280])
def test_nothing_on_the_page_covers_anything_else(
    browser: Browser, tmp_path: Path, width: int, scheme: str
) -> None:
    run = write_long_legends(tmp_path / "run")
    (run / "report.html").write_text(page([read_record(run)]))
    browser.imitate(width, scheme)
    browser.open((run / "report.html").as_uri())
    browser.wait("return document.querySelectorAll('.js-plotly-plot .xtitle').length > 5")
    shown = browser.run(BOXES)
    assert shown["width"] <= width
    assert len(shown["panels"]) == 6 and sum(len(panel["entries"]) for panel in shown["panels"]) > 25
    for panel in shown["panels"]:
        title, curves, legend = panel["title"], panel["curves"], panel["legend"]
        assert title[3] <= panel["plot"][1] + 1, panel["name"]
        assert curves[3] - curves[1] > 100, panel["name"]
        if legend is not None:
            assert not any(overlap(legend, other) for other in (title, curves, panel["axis"])), panel[
                "name"
            ]
            assert legend[3] <= panel["plot"][3] + 1 and legend[2] <= panel["plot"][2] + 1, panel["name"]
        for index, entry in enumerate(panel["entries"]):
            assert not any(overlap(entry, other) for other in panel["entries"][:index]), panel["name"]
    shades = browser.run(LUMINANCE)
    for text in ("ink", "label", "legend", "note"):
        assert abs(shades[text] - shades["card"]) > 0.35, text
    assert (shades["card"] < 0.3) == (shades["page"] < 0.3) == (scheme == "dark")
    texts = browser.run("return document.getElementById('answers').textContent")
    assert "reward 0.8182 " in texts and "0.81818" not in texts
    times = browser.run("return document.getElementById('phases').textContent")
    assert "0.01 ms" in times and "e-05" not in times


def test_a_watched_page_follows_its_run_and_refuses_other_hosts(
    browser: Browser, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "watched", steps=2)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("")  # begun, and no step done yet
    server = make_server([run], 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        for host, status in (
            ("evil.example", 403),
            ("127.0.0.1.evil.example:80", 403),
            ("localhost:1", 200),
        ):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
            connection.request("GET", "/data", headers={"Host": host})
            assert connection.getresponse().status == status
            connection.close()
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        state = "return document.getElementById('state').textContent"
        browser.wait(f"{state} === 'No step is done yet.'")
        for done in (1, 2):
            (run / "metrics.jsonl").write_text("".join(lines[:done]))
            browser.wait(f"{state}.includes('{done}{' of 2' * (done < 2)} steps in')")
        assert browser.run("return window.owned ?? null") is None and browser.complaints() == []
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_port_that_is_taken_ends_in_one_sentence(run: Path) -> None:
    server = make_server([run], 0)
    try:
        with pytest.raises(
            UserError, match=rf"--port {server.server_port} cannot be listened on .*: name another"
        ):
            make_server([run], server.server_port)
    finally:
        server.server_close()
    with pytest.raises(UserError, match="has no metrics.jsonl, so it is not a run's folder"):
        make_server([run.parent], 0)


def test_nothing_in_the_json_can_end_its_element() -> None:
    """An HTML parser finds `<` only where the template has it, and reads the text back as it is shown."""
    text = embedded({"text": HOSTILE, HOSTILE: [HOSTILE], "gone": float("nan")})
    assert not set("<>&") & set(text) and text.isprintable()
    assert json.loads(text) == {"text": SHOWN, SHOWN: [SHOWN], "gone": None}
    assert visible("tab\tline\nümläut 数 👩\u200d🚀") == "tab\tline\nümläut 数 👩\u200d🚀"


def test_a_long_run_has_a_page_of_limited_size_with_its_highs_and_lows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"train/step": step, "gap/max": float(step % 7), "eval/accuracy": 0.5} for step in range(1, 5001)
    ]
    rows[1233]["gap/max"], rows[3456]["gap/max"] = 99.0, -99.0
    steps, values = curves(rows, 500)["gap/max"]
    assert len(steps) <= 510 and steps == sorted(steps) and (steps[0], steps[-1]) == (1, 5000)
    assert (1234, 99.0) in zip(steps, values, strict=True) and (3457, -99.0) in zip(
        steps, values, strict=True
    )
    answers = [{"train/step": step, "text": "x" * 4000} for step in range(100) for _ in range(8)]
    kept = some_steps(answers, 10**6)
    assert sorted({row["train/step"] for row in kept}) == list(range(3, 100, 4)) and len(kept) == 200
    assert len(some_steps(answers[-8:], 20_000)) == 4

    run = write_run(tmp_path / "long", steps=40, text="<" * 4000)  # six bytes each in the page
    for name in ("completions", "tokens"):
        (run / f"{name}.jsonl").write_text((run / f"{name}.jsonl").read_text() * 40)
    assert 10**7 < len(page([read_record(run)] * 3).encode()) <= LIMIT == 20 * 10**6
    monkeypatch.setattr(report_page, "LIMIT", 7 * 10**6)
    assert len(page([read_record(run)] * 3).encode()) <= 7 * 10**6
