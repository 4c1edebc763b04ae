"""An export like another model's folder: names are checked, and its other files are copied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeworker.errors import UsageError
from pipeworker.record.weights.model_folder import copy_files, like

SHARED = torch.arange(6.0).view(2, 3)
WEIGHTS = {"words.weight": SHARED, "norm.bias": torch.ones(3), "head.weight": SHARED}


def folder(path: Path, weights: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


def test_a_tied_weight_has_the_name_of_the_folder(tmp_path: Path) -> None:
    for kept in ("words.weight", "head.weight"):
        own = {kept: torch.zeros(2, 3), "norm.bias": torch.zeros(3)}
        found = like(WEIGHTS, folder(tmp_path / kept, own))
        assert {*found} == {*own}
        assert all(found[name] is WEIGHTS[name] for name in found)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"norm.bias": torch.zeros(3)}, "it lacks words.weight, head.weight of the run"),
        (
            {"words.weight": torch.zeros(2, 3), "norm.bias": torch.zeros(3), "a": torch.zeros(1)},
            "the run lacks a; name the folder of the same model",
        ),
        (
            {"words.weight": torch.zeros(3, 2), "norm.bias": torch.zeros(3)},
            "of another shape are words.weight",
        ),
    ],
)
def test_other_weights_are_an_error(
    tmp_path: Path, weights: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(UsageError, match=rf"^--like .*/other: its weights are not .*{message}"):
        like(WEIGHTS, folder(tmp_path / "other", weights))


def test_a_folder_without_a_configuration_or_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--like .*: it has no config\.json"):
        like(WEIGHTS, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"^--like .*: it has no model\.safetensors\.index\.json"):
        like(WEIGHTS, tmp_path)


def test_files_besides_weights_are_copied(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", {"a": torch.ones(1)})
    for name in ("tokenizer.json", "merges.txt", "chat_template.jinja"):
        (source / name).write_text(name)
    (source / "model.safetensors.index.json").write_text("{}")
    (source / "optimizer.pt").write_bytes(b"x")
    target = tmp_path / "target"
    target.mkdir()
    copies = copy_files(source, target)
    names = ["chat_template.jinja", "config.json", "merges.txt", "tokenizer.json"]
    assert [path.name for path in copies] == names == sorted(p.name for p in target.iterdir())
    assert (target / "merges.txt").read_text() == "merges.txt"
    assert load_file(source / "model.safetensors")
