"""The page in a real browser: Chromium without a window, light and dark, laptop and phone."""

import json
import os
import re
import shutil
import subprocess
from html import unescape

import numpy as np
import pytest
import synthetic_runs
from synthetic_runs import DEFAULTS, long_run, run_of

from maxdiloco.page import html
from maxdiloco.page.run import NOT_FINITE

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LAPTOP, PHONE = (1366, 768), (390, 844)
STREAMING = {
    "enable_streaming_diloco": True,
    "num_diloco_fragments": 24,
    "num_communication_overlapping_steps": 4,
}

# Loads each page in a frame of each size, and writes down what a reader would see there.
FRAMES = """<!doctype html><title>frames</title><body style="margin:0"><script>
const luminance = (rgb) => {
  const part = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = rgb.match(/[\\d.]+/g).map(Number).map(part);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (a, b) => {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};
function seen(frame) {
  const page = frame.contentDocument, view = frame.contentWindow;
  const styles = (found) => [...page.querySelectorAll(found)].map((e) => view.getComputedStyle(e));
  const back = view.getComputedStyle(page.querySelector(".panel")).backgroundColor;
  const colours = [..."0123456"].map((n) => {
    const probe = page.body.appendChild(page.createElement("i"));
    probe.style.color = `var(--c${n})`;
    const value = view.getComputedStyle(probe).color;
    probe.remove();
    return value;
  });
  const over = page.querySelector(".u-over"), box = over.getBoundingClientRect();
  over.dispatchEvent(new view.MouseEvent("mousemove", { bubbles: true,
    clientX: box.left + box.width / 2, clientY: box.top + box.height / 2 }));
  const painted = [...page.querySelectorAll("canvas")].map((canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let count = 0;
    for (let i = 3; i < data.length; i += 4) count += data[i] > 0;
    return count;
  });
  // What is written next to each other may not lie on each other.
  const written = ".title > *, .readout > *, .controls > *, td";
  const boxes = [...page.querySelectorAll(written)]
    .map((e) => [e, e.getBoundingClientRect()]).filter(([, b]) => b.width && b.height);
  const overlaps = [];
  boxes.forEach(([a, p], i) => boxes.slice(i + 1, i + 40).forEach(([b, q]) => {
    const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    const lies = !a.contains(b) && !b.contains(a) && wide > 1 && high > 1;
    if (lies) overlaps.push(a.innerText + " on " + b.innerText);
  }));
  // What a screen reader says of each control and chart, and what the Tab key reaches.
  const named = (e) => e.getAttribute("aria-label") || e.labels?.[0]?.innerText || e.innerText;
  const controls = [...page.querySelectorAll("button, select, input, summary, [role=img]")];
  const nameless = controls.filter((e) => !(named(e) || "").trim()).map((e) => e.outerHTML);
  const unreached = controls.filter((e) => !e.matches("[role=img]") && e.tabIndex < 0).length;
  const unitless = [...page.querySelectorAll(".panel h3")]
    .filter((e) => !e.querySelector("small")).map((e) => e.innerText);
  const readout = page.querySelector(".readout").innerText;
  const table = page.querySelector("table").innerText;
  const texts = "h1, h2, h3, p, td, th, span, label, button, summary, small, li";
  const found = {
    ready: page.documentElement.dataset.ready, charts: +page.documentElement.dataset.charts,
    wider: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    smallest: Math.min(...styles(texts).map((s) => parseFloat(s.fontSize))),
    weakest: Math.min(...styles(texts).map((s) => contrast(s.color, back))),
    faintest: Math.min(...colours.map((c) => contrast(c, back))),
    dark: luminance(back) < 0.5, least_painted: Math.min(...painted),
    columns: styles("#panels")[0].gridTemplateColumns.split(" ").length,
    readout, table, overlaps, nameless, unreached, unitless,
  };
  // Every control is used once: none may fail.
  for (const select of page.querySelectorAll("select")) {
    select.selectedIndex = select.options.length - 1;
    select.onchange();
  }
  const others = page.getElementById("others");
  others.open = true;
  others.dispatchEvent(new view.Event("toggle"));
  for (const button of page.querySelectorAll("button, #replicas")) button.click();
  found.with_others = page.querySelectorAll(".uplot").length;
  found.axes = page.getElementById("x-axis").length;
  return found;
}
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(seen);
  document.body.innerHTML = "<pre></pre>";
  document.querySelector("pre").textContent = JSON.stringify(found);
});
</script>FRAMES</body>"""


@pytest.fixture(scope="module")
def chromium():
    given = os.environ.get("MAXDILOCO_BROWSER")
    found = given or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium on PATH: apt-get install chromium, or set MAXDILOCO_BROWSER")
    return found


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """{name: file}: 2 and 64 replicas, 100,000 steps, ten runs, one row."""
    folder = tmp_path_factory.mktemp("pages")
    names = set(synthetic_runs.row(10, 2)) - {"step"}
    columns = {name: np.ones(100) for name in sorted(names)}
    columns["learning/loss"][50] = NOT_FINITE
    begun = [synthetic_runs.start(t, bytes_sent=[1.5e6] * 100) for t in (0, 40)]
    two = run_of(columns=columns, history=[*begun, synthetic_runs.end()], **STREAMING)
    two = two._replace(checkpoints={100: 1.7e9})
    many = [run_of(name=f"a-run-with-a-rather-long-name-{n}") for n in range(9)]
    plain = run_of(rows=1, columns={"learning/loss": np.ones(1)}, enable_diloco=False)
    runs = {
        "two": [two],
        "long_2": [long_run(2)],
        "long_64": [long_run(64)],
        "many": [two, *many],
        "plain": [plain],
    }
    for name, each in runs.items():
        (folder / f"{name}.html").write_text(html.page(each, DEFAULTS), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in runs}


def look(chromium, pages, folder, *, dark):
    """{(page, size): what the script above saw} and what the browser's console said."""
    order = [(name, size) for name in pages for size in (LAPTOP, PHONE)]
    frames = [
        f'<iframe src="{pages[name].as_uri()}" width="{w}" height="{h}"></iframe>'
        for name, (w, h) in order
    ]
    wrapper = folder / "frames.html"
    wrapper.write_text(FRAMES.replace("FRAMES", "".join(frames)), encoding="utf-8")
    command = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
        "--enable-logging=stderr", f"--user-data-dir={folder}/profile", "--window-size=1400,900",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--dump-dom", wrapper.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    (text,) = re.findall(r"<pre>(.*?)</pre>", done.stdout, re.S)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return dict(zip(order, json.loads(unescape(text)), strict=True)), console


@pytest.mark.parametrize("dark", [False, True])
def test_every_page_is_drawn_and_readable_at_both_sizes(chromium, pages, tmp_path, dark):
    """Contrast as WCAG 2 asks: 4.5 for text, 3 for lines of a chart."""
    seen, console = look(chromium, pages, tmp_path, dark=dark)
    assert console == []
    for (name, size), found in seen.items():
        where = f"{name} at {size}: {found}"
        assert found["ready"] is not None and found["charts"] >= 1, where
        assert found["least_painted"] > 100, where
        assert found["wider"] <= 0, where
        assert found["smallest"] >= 12, where
        assert found["dark"] == dark, where
        assert found["weakest"] >= 4.5 and found["faintest"] >= 3, where
        assert found["overlaps"] == [] == found["nameless"] == found["unitless"], where
        assert found["unreached"] == 0, where
        assert found["columns"] == (2 if size == LAPTOP else 1), where
        assert re.match(r"step [\d,]+\s", found["readout"]) or name == "plain", where
    assert "64 replicas" in seen["long_64", LAPTOP]["readout"]
    assert re.search(r"replica 0 .*replica 1 ", seen["long_2", PHONE]["readout"], re.S)
    # Two charts of the timeline beside those of the metrics.
    assert seen["two", LAPTOP]["charts"] == seen["two", PHONE]["charts"] == 10 + 2
    assert seen["two", PHONE]["with_others"] == seen["two", PHONE]["charts"] + 4
    assert seen["two", PHONE]["axes"] == 3  # learning/tokens and the bytes that were sent
    assert "a-run-with-a-rather-long-name-8" in seen["many", PHONE]["table"]


def test_a_script_that_fails_is_found(chromium, pages, tmp_path):
    """Positive control of the test above: the console has the error of a broken page."""
    broken = tmp_path / "broken.html"
    text = pages["plain"].read_text(encoding="utf-8")
    broken.write_text(text.replace("\nbegin();", "\nbegin(); f();"), encoding="utf-8")
    _, console = look(chromium, {"plain": broken}, tmp_path, dark=False)
    assert [line for line in console if "f is not defined" in line]


def test_what_overlaps_or_has_no_name_or_unit_is_found(chromium, pages, tmp_path):
    """Positive control: a button without a name that lies on another one, out of reach of the Tab
    key; a chart without a unit."""
    broken = tmp_path / "broken.html"
    text = pages["two"].read_text(encoding="utf-8")
    button = '<button type="button" tabindex="-1" style="margin-left:-40px;width:30px"></button>'
    text = text.replace("whole run</button>", f"whole run</button>{button}")
    text = text.replace('"unit": "tokens/s"', '"unit": ""')
    broken.write_text(text, encoding="utf-8")
    seen, _ = look(chromium, {"broken": broken}, tmp_path, dark=False)
    found = seen["broken", LAPTOP]
    assert found["overlaps"] and found["nameless"] == [button] and found["unreached"] == 1
    assert found["unitless"] == ["Tokens a second"]
