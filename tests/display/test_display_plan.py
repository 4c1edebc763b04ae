"""Plans as people see them: tables, timelines and pictures, compared with the plan's own values."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from pipeworker.display.plan import page
from pipeworker.display.plan.as_json import to_json
from pipeworker.display.plan.schedules import EqualStages
from pipeworker.display.plan.svg import Picture
from pipeworker.display.plan.text import NAMES, lines_of, timeline_rows
from pipeworker.display.plan.view import PlanView
from pipeworker.facts.layer_facts import LayerFacts, NetworkFacts
from pipeworker.plan.actions import Action, Kind
from pipeworker.plan.connect import connect
from pipeworker.plan.orders import ORDERS, resolve
from pipeworker.plan.placement import Placement
from pipeworker.plan.planned import Planned
from pipeworker.plan.planner.choices import Alternative, PlanRequest
from pipeworker.plan.schedule import Schedule
from pipeworker.plan.simulate import Costs, Span, Timing, simulate
from support.pure.makespans import peak_graphs
from support.pure.orders import build, zero_bubble

SVG = "{http://www.w3.org/2000/svg}"
GB = 10**9
WHY = "recompute on stage 0: 14.2 of 16 GB without"


def planned(schedule: Schedule, order: str = "gpipe", mode: str = "always") -> Planned:
    """Return a plan in which stage 0 recomputes, and stages and workers differ."""
    stages, workers = schedule.placement.stages, schedule.placement.workers
    costs = Costs(
        tuple(0.010 + 0.002 * s for s in range(stages)),
        tuple(0.020 + 0.004 * s for s in range(stages)),
        tuple(0.010 + 0.002 * s for s in range(stages)),
    )
    return Planned(
        schedule,
        order,
        (2,) * stages,
        (mode, *["never"] * (stages - 1)),
        costs,
        simulate(schedule, costs),
        0.005,
        tuple((12 + w) * GB for w in range(workers)),
        (16 * GB,) * (workers - 1) + (None,),
        (WHY,),
    )


def gpipe(stages: int = 3, microbatches: int = 4) -> Schedule:
    order, modes = resolve("gpipe"), ("always", *["never"] * (stages - 1))
    return order.build(order.place(stages), microbatches, modes)


def split(placement: Placement, microbatches: int = 4) -> Schedule:
    """Return a schedule whose backwards are in two parts."""
    return connect("zb", microbatches, placement, zero_bubble(placement, microbatches))


def view_of(
    plan: Planned, *choices: Alternative, measured: bool = True, samples: int = 0
) -> PlanView:
    layers = sum(plan.balance)
    facts = NetworkFacts(
        tuple(LayerFacts("Linear", parameters=1000 * (n + 1)) for n in range(layers)),
        samples=8,
        measured=measured,
        batch_samples=samples,
    )
    return PlanView.of(plan, facts, choices)


@pytest.fixture
def view() -> PlanView:
    plan = planned(gpipe())
    timing = Timing(0.245, (0.18375,) * 3, ({},) * 3)  # a bubble of 25 %, and 5 ms of an update
    other = replace(plan, order="1f1b", timing=timing, memory=(17 * GB,) * 3)
    return view_of(
        plan,
        Alternative(PlanRequest("gpipe", 3, 4), plan),
        Alternative(PlanRequest("1f1b", 3, 4), other),
        Alternative(PlanRequest("gpipe", 8, 4), problem="model() has 6 layers"),
    )


# The view.


def test_a_stage_has_the_seconds_of_a_step(view: PlanView) -> None:
    first, _, last = view.stages
    assert first.seconds.forward == pytest.approx(4 * 0.010)
    assert first.seconds.recompute == first.seconds.forward
    assert first.seconds.backward == pytest.approx(4 * 0.020)
    assert (last.seconds.recompute, last.layers, last.parameters) == (0, (4, 6), 11_000)
    assert (first.memory, first.limit, last.limit) == (12 * GB, 16 * GB, None)
    assert sum(s.seconds.total for s in view.stages) == pytest.approx(sum(view.planned.timing.busy))


def test_both_parts_of_a_backward_count(view: PlanView) -> None:
    parts = view_of(planned(split(Placement.identity(3)), mode="never"))
    assert parts.stages[1].seconds.backward == pytest.approx(view.stages[1].seconds.backward)


def test_samples_are_those_of_a_mini_batch(view: PlanView) -> None:
    assert view.samples == 4 * 8
    assert view.samples_per_second(view.planned) == pytest.approx(32 / view.planned.step_seconds)
    two = gpipe().placement.copies(2)
    copies = resolve("gpipe").build(two, 4, ("never",) * 3)
    assert view_of(planned(copies)).samples == 2 * 4 * 8
    assert view_of(view.planned, samples=29).samples == 29  # the last micro-batches have fewer


def test_a_plan_that_exceeds_a_limit_does_not_fit() -> None:
    assert planned(gpipe()).fits
    assert planned(gpipe(6)).fits  # the last worker has no limit
    assert not planned(gpipe(7)).fits


# Text.

TEXT = """\
3 stages, 4 micro-batches, gpipe, 8 samples a micro-batch
step 245 ms, 131 samples/s, bubble 34.4%
recompute on stage 0: 14.2 of 16 GB without

stage  layers  parameters  forward  recompute  backward   memory    limit  recompute mode
    0     0-1        3.0k  40.0 ms    40.0 ms   80.0 ms  12.0 GB  16.0 GB  always
    1     2-3        7.0k  48.0 ms          -   96.0 ms  13.0 GB  16.0 GB  never
    2     4-5         11k  56.0 ms          -    112 ms  14.0 GB        -  never

stage 0  F0F1F2F3R0─·················B0──R1B1──R2B2───R3B3──
stage 1  ··F0─F1F2─F3···········B0───B1────B2────B3───······
stage 2  ·····F0─F1─F2─F3─B0────B1───B2────B3────···········
F forward   R recompute   B backward   · idle

   schedule  stages    step  samples/s  bubble   memory
*  gpipe          3  245 ms        131   34.4%  14.0 GB
   1f1b           3  250 ms        128   25.0%  17.0 GB  does not fit
   gpipe          8       -          -       -        -  model() has 6 layers
"""


def test_the_text_of_a_plan(view: PlanView) -> None:
    assert list(lines_of(view, 60)) == TEXT.splitlines()


def test_counted_operations_have_no_unit() -> None:
    view = view_of(planned(gpipe()), measured=False)
    text = "\n".join(lines_of(view, 60))
    assert "from counted operations: nothing was measured" in text
    assert "samples/s" not in text
    assert " ms" not in text
    shares = [float(cell) for cell in re.findall(r"([\d.]+)%  ", text.partition("stage")[2])]
    assert sum(shares) == pytest.approx(100, abs=0.5)


@pytest.mark.parametrize("width", [30, 60, 100, 211])
def test_a_timeline_is_to_scale(width: int) -> None:
    view = view_of(planned(split(Placement.identity(3), 6), mode="never"))
    margin = len("stage 0  ")
    columns = width - margin
    scale = columns / view.planned.timing.makespan
    for row, spans in zip(timeline_rows(view.rows, view.spans, width), view.spans, strict=True):
        assert sum(len(text) for text, _ in row) == width
        kinds = [kind for text, kind in row[1:] for _ in text]
        busy = dict.fromkeys(NAMES, 0.0)
        for span in spans:
            busy[span.action.kind] += (span.end - span.start) * scale
            middle = int((span.start + span.end) / 2 * scale)
            if (span.end - span.start) * scale >= 3:
                assert kinds[middle] is span.action.kind
        for kind, cells in busy.items():
            assert kinds.count(kind) == pytest.approx(cells, abs=len(spans) / 2 + 1)


def test_many_micro_batches_fill_the_columns_that_they_take() -> None:
    """Actions narrower than a character are not idle time."""
    order = resolve("gpipe")
    view = view_of(planned(order.build(order.place(2), 300, ("never",) * 2), mode="never"))
    (_, *last) = timeline_rows(view.rows, view.spans, 80)[-1]
    kinds = [kind for text, kind in last for _ in text]
    assert kinds.count(None) <= 2
    assert kinds.count(Kind.BACKWARD) == pytest.approx(2 * kinds.count(Kind.FORWARD), abs=3)


def test_a_character_that_two_actions_share_does_not_look_like_a_third() -> None:
    view = view_of(planned(gpipe(2, 8)))
    for width in range(40, 140):
        for row in timeline_rows(view.rows, view.spans, width):
            text = "".join(text for text, _ in row[1:])
            if all(f"B{m}" in text and f"F{m}" in text for m in range(8)):
                assert not re.search(r"([FRB])\1", text), text


# Pictures.


def boxes(root: ElementTree.Element) -> dict[str, tuple[str, float, float, float]]:
    """Return class, left, width and top of each action's box, by its action."""
    found = {}
    for rect in root.iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and title.text:
            x, width, y = (float(rect.attrib[name]) for name in ("x", "width", "y"))
            found[title.text.partition(":")[0]] = (rect.attrib["class"], x, width, y)
    return found


def test_a_picture_is_to_scale(view: PlanView) -> None:
    root = ElementTree.fromstring(page.picture_of(view).svg())
    found = boxes(root)
    spans = [(row, span) for row, some in enumerate(view.spans) for span in some]
    assert len(found) == len(spans)
    (idle, *_) = [r for r in root.iter(f"{SVG}rect") if r.attrib["class"] == "idle"]
    left, length = float(idle.attrib["x"]), float(idle.attrib["width"])
    scale = length / view.planned.timing.makespan
    classes = {Kind.FORWARD: "forward", Kind.RECOMPUTE: "recompute", Kind.BACKWARD: "backward"}
    tops = []
    for row, (action, start, end) in spans:
        name, x, width, y = found[str(action)]
        assert name == classes[action.kind]
        assert x == pytest.approx(left + start * scale, abs=0.01)
        assert width == pytest.approx((end - start) * scale, abs=0.01)
        tops.append((row, y))
    assert len(set(tops)) == 3  # one line for each worker
    assert left + length < float(root.attrib["width"])


def test_a_picture_marks_each_micro_batch_and_names_each_kind(view: PlanView) -> None:
    root = ElementTree.fromstring(page.picture_of(view).svg())
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    marks = [t.text for t in root.iter(f"{SVG}text") if t.attrib.get("class", "")[:4] == "mark"]
    assert marks.count("3") == 3 * 2 + 1
    for label in ("stage 0", "forward", "recompute", "backward", "update of the weights"):
        assert label in texts
    assert f"idle, the bubble: {view.planned.timing.bubble:.1%}" in texts
    assert "backward, weight part" not in texts
    assert texts[0] == page.picture_of(view).title
    assert "100 ms" in texts  # of the axis


def test_kinds_differ_without_colours() -> None:
    """Recompute and the weight part have patterns; the other kinds differ in brightness."""
    view = view_of(planned(split(Placement(((0, 3), (1, 2)))), mode="never"))
    text = page.picture_of(view).svg()
    root = ElementTree.fromstring(text)
    patterns = {pattern.attrib["id"] for pattern in root.iter(f"{SVG}pattern")}
    assert patterns == {"recompute", "weight"}
    for rect in root.iter(f"{SVG}rect"):
        if rect.attrib["class"] == "weight" and rect.find(f"{SVG}title") is not None:
            assert rect.attrib["style"] == "fill:url(#weight)"
    colours = dict(re.findall(r"^\.(\w+) \{ fill: (#\w{6});", text, re.MULTILINE))
    solid = [colours[name] for name in ("forward", "backward", "input")]
    grey = sorted(brightness(colour) for colour in solid)
    assert all(b - a > 0.08 for a, b in pairwise(grey))
    assert abs(brightness(colours["recompute"]) - brightness(colours["weight"])) > 0.3


def brightness(colour: str) -> float:
    """Return the relative luminance of a colour (WCAG 2)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    light, dark = sorted((brightness(a), brightness(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_marks_and_labels_are_legible_in_both_themes(view: PlanView) -> None:
    text = page.picture_of(view).svg()
    light, _, dark = text.partition("@media (prefers-color-scheme: dark)")
    fills = dict(re.findall(r"^\.(\w+) \{ fill: (#\w{6});", light, re.MULTILINE))
    for names, colour in re.findall(r"^((?:\.on-\w+,? )+)\{ fill: (#\w{6});", light, re.MULTILINE):
        for name in re.findall(r"on-(\w+)", names):
            assert contrast(fills[name], colour) >= 4.5, name
    (ink,) = re.findall(r"^text \{ fill: (#\w{6});", light, re.MULTILINE)
    (bright,) = re.findall(r"^  text \{ fill: (#\w{6});", dark, re.MULTILINE)
    assert contrast(ink, "#ffffff") >= 7
    assert contrast(bright, "#14181d") >= 7


def test_later_stages_of_a_worker_have_strips() -> None:
    v = Placement(((0, 3), (1, 2)))
    root = ElementTree.fromstring(page.picture_of(view_of(planned(split(v)))).svg())
    strips = [r for r in root.iter(f"{SVG}rect") if r.attrib["class"] == "later"]
    actions = [a for some in split(v).workers for a in some if a.kind in NAMES]
    later = sum(action.stage in (2, 3) for action in actions)
    assert len(strips) == later + 1  # and the legend's
    assert "on the worker's next stage" in [text.text for text in root.iter(f"{SVG}text")]


def test_a_picture_of_a_million_actions_is_small() -> None:
    """Actions that are narrower than a pixel are drawn together."""
    spans = [Span(Action(Kind.FORWARD, 0, m), float(m), m + 1.0) for m in range(100_000)]
    text = Picture("many", ["stage 0"], [spans], 0.0, timed=False).svg()
    assert text.count("<rect") < 20
    ElementTree.fromstring(text)


def test_titles_are_escaped() -> None:
    text = Picture("a < b & c", ["<s>"], [[]], 0.0).svg()
    root = ElementTree.fromstring(text)
    assert "a < b & c" in [element.text for element in root.iter()]


def test_the_page_of_a_plan_loads_nothing(view: PlanView) -> None:
    text = page.html(view)
    root = ElementTree.fromstring(text.partition("\n")[2])
    assert not [e for e in root.iter() if e.tag.rpartition("}")[2] in ("script", "link", "img")]
    assert not re.search(r"(?:src|href)=|@import|url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert root.find(f".//{SVG}svg") is not None
    tables = [
        [["".join(cell.itertext()).strip() for cell in row] for row in table.iter("tr")]
        for table in root.iter("table")
    ]
    stages, choices = tables
    assert stages[1] == [
        *("0", "0", "0-1", "3.0k", "40.0 ms", "40.0 ms", "80.0 ms"),
        *("12.0 GB", "16.0 GB", "always"),
    ]
    assert [row[0] for row in choices] == ["schedule", "gpipe", "1f1b", "gpipe"]
    assert choices[2][-1] == "does not fit"
    assert choices[3][-1] == "model() has 6 layers"
    chosen = [row for row in root.iter("tr") if row.attrib.get("class") == "chosen"]
    assert len(chosen) == 1


# JSON.


def test_the_object_has_what_tools_read(view: PlanView) -> None:
    found: dict[str, Any] = json.loads(json.dumps(to_json(view), allow_nan=False))
    promised = {
        *("schedule", "stages", "step_seconds", "samples_per_second", "bubble", "alternatives")
    }
    assert promised <= found.keys()
    assert [s.keys() for s in found["stages"]] == [
        {
            *("stage", "worker", "layers", "parameters", "seconds"),
            *("memory_bytes", "limit_bytes", "recompute"),
        }
    ] * 3
    assert found["stages"][2]["layers"] == [4, 6]
    assert found["stages"][2]["limit_bytes"] is None
    assert found["stages"][0]["seconds"].keys() == {"forward", "recompute", "backward"}
    assert found["step_seconds"] == view.planned.step_seconds
    assert found["why"] == [WHY]
    own, other, none = found["alternatives"]
    assert own["step_seconds"] == found["step_seconds"]
    assert (other["schedule"], other["fits"], other["memory_bytes"]) == ("1f1b", False, 17 * GB)
    assert none == {
        "schedule": "gpipe",
        "stages": 8,
        "virtual_stages": 1,
        "microbatches": 0,
        "problem": "model() has 6 layers",
    }


def test_counted_operations_are_no_seconds() -> None:
    found = to_json(view_of(planned(gpipe()), measured=False))
    assert (found["measured"], found["step_seconds"], found["samples_per_second"]) == (
        False,
        None,
        None,
    )
    assert found["stages"][0]["seconds"] == {"forward": None, "recompute": None, "backward": None}
    assert found["bubble"] > 0


@pytest.mark.parametrize("name", sorted(ORDERS))
@pytest.mark.parametrize("recompute", ["always", "except_first", "never"])
def test_held_micro_batches_are_those_that_a_worker_holds_at_once(
    name: str, recompute: str
) -> None:
    """Its stages reach their largest numbers at different times."""
    schedule = build(name, 4, 9, recompute)
    placement = schedule.placement
    graphs = max(peak_graphs(schedule, worker) for worker in range(placement.workers))
    held = EqualStages.of(schedule).held
    assert held == graphs * placement.workers / placement.stages
