"""The networks of GPipe's and torchgpipe's tables: their sizes, and small versions that learn."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeworker.job import file
from support.in_process.single_worker import restored_process
from support.real_jobs.jobs import Jobs
from support.slow import slow

restored = pytest.fixture(autouse=True)(restored_process)

PAPERS = Path(__file__).parents[2] / "examples" / "papers"
TRANSFORMER = ("--width", "2048", "--inner", "8192", "--heads", "32", "--words", "32000")
AMOEBANET = ("--side", "224", "--classes", "1000")


def built(network: str, *words: str) -> list[nn.Module]:
    """Return the layers of a network, without memory for their parameters."""
    job = file.load(PAPERS / f"{network}.py", words)
    with torch.device("meta"):
        return [make() for make in job.model()]


def parameters(layers: list[nn.Module]) -> int:
    return sum(p.numel() for layer in layers for p in layer.parameters())


@pytest.mark.parametrize(
    ("network", "words", "millions"),
    [
        ("amoebanet", ("--cells", "18", "--filters", "208", *AMOEBANET), 81.5),
        pytest.param(
            "amoebanet", ("--cells", "18", "--filters", "416", *AMOEBANET), 319.0, marks=slow
        ),
        pytest.param(
            "amoebanet", ("--cells", "18", "--filters", "544", *AMOEBANET), 542.7, marks=slow
        ),
        ("amoebanet", ("--cells", "36", "--filters", "544", *AMOEBANET), 1056),
        pytest.param(
            "amoebanet", ("--cells", "72", "--filters", "512", *AMOEBANET), 1845, marks=slow
        ),
        ("unet", ("--blocks", "6", "--channels", "72"), 362.2),
        ("unet", ("--blocks", "11", "--channels", "128"), 2214),
        ("unet", ("--blocks", "24", "--channels", "128"), 4994),
        ("unet", ("--blocks", "24", "--channels", "160"), 7803),
        pytest.param("unet", ("--blocks", "48", "--channels", "160"), 15822, marks=slow),
        ("transformer", ("--layers", "3", *TRANSFORMER), 282.2),
        ("transformer", ("--layers", "13", *TRANSFORMER), 785.8),
        ("transformer", ("--layers", "103", *TRANSFORMER), 5318),
        pytest.param("transformer", ("--layers", "415", *TRANSFORMER), 21030, marks=slow),
    ],
)
def test_the_networks_have_the_parameters_of_the_papers(
    network: str, words: tuple[str, ...], millions: float
) -> None:
    assert parameters(built(network, *words)) / 1e6 == pytest.approx(millions, rel=1e-3)


def test_a_layer_of_the_transformer_has_matrices_of_50_33_million() -> None:
    _, *halves, _ = built("transformer", "--layers", "1", *TRANSFORMER)
    matrices = sum(p.numel() for half in halves for p in half.parameters() if p.dim() == 2)
    assert matrices == 4 * 2048**2 + 2 * 2048 * 8192 == 50_331_648


def test_resnet_101_has_the_layers_that_torchgpipe_divides() -> None:
    layers = built("resnet101", "--depth", "101", "--channels", "64", "--classes", "1000")
    assert len(layers) == 370
    assert parameters(layers) == 44_549_160


def test_the_images_of_the_paper_shrink_to_seven_points() -> None:
    *body, head = built("amoebanet", "--cells", "6", "--filters", "64", *AMOEBANET)
    value = torch.empty(2, 3, 224, 224, device="meta")
    for layer in body:
        value = layer(value)
    assert value[0].shape[2:] == (7, 7)
    assert head(value).shape == (2, 1000)


@slow
@pytest.mark.parametrize(
    ("network", "steps", "figure", "least"),
    [
        ("amoebanet", 60, "accuracy", 0.8),
        ("unet", 60, "accuracy", 0.93),
        ("resnet101", 60, "accuracy", 0.8),
        ("transformer", 100, "loss", 2.25),
    ],
)
def test_small_networks_learn_and_two_stages_have_the_bits_of_one(
    jobs: Jobs, network: str, steps: int, figure: str, least: float
) -> None:
    if network != "transformer" and find_spec("sklearn") is None:
        pytest.skip("scikit-learn is not installed: pip install '.[examples]'")
    found = []
    for stages in ("1", "2"):
        words = ("--microbatches", "4", "--evaluate-every", str(steps), "--run-dir", f"run{stages}")
        path = str(PAPERS / f"{network}.py")
        done = jobs.pipeworker("launch", "--stages", stages, "--steps", str(steps), *words, path)
        assert done.returncode == 0, done.stderr
        run = jobs.folder / f"run{stages}"
        found.append((run / "evaluation.jsonl").read_text())
    one, two = found
    assert one == two
    value = float(json.loads(one)[figure])
    assert value <= least if figure == "loss" else value >= least
