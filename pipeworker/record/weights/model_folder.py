"""Another model's folder as the pattern of an export: its names, and its files besides weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from pipeworker.errors import UnreadableFile, UsageError
from pipeworker.record.checkpoint.json_state import Tensors
from pipeworker.record.checkpoint.state_dict_diff import some
from pipeworker.record.checkpoint.tensor_file import TensorFile
from pipeworker.record.files.atomic_file import sync_file
from pipeworker.record.files.bounded_file import read_json
from pipeworker.record.weights.conversions import stored_form
from pipeworker.record.weights.weight_files import SAFETENSORS, find_files

_COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py", ".vocab", ".bpe", ".md")
"""The endings of a model's files besides weights: configurations, tokenizers, templates, code."""
_CONFIG = "config.json"
_MOST_BYTES = 256 << 20
"""The size up to which such a file is copied."""
_MOST_SHOWN = 3


def like(weights: Tensors, folder: Path) -> Tensors:
    """Return weights under the names of a folder's weights, each once.

    Of a parameter that has several names, those remain that the folder has.

    Raises:
        UsageError: the folder is not that of a model, or its weights have other names or shapes.
    """
    option = f"--like {folder}"
    if not (folder / _CONFIG).is_file():
        raise UsageError(f"{option}: it has no {_CONFIG}; name the folder of a model")
    try:
        found = find_files(folder)
        shapes = dict(_shapes(found.files))
        config = read_json(folder / _CONFIG, dict, "it is no configuration", "save the model again")
    except UsageError as error:
        raise UsageError(f"--like {error}") from None
    except OSError as error:
        raise UnreadableFile(folder, error) from None
    try:
        weights = stored_form(weights, folder, config.get("architectures"))
    except Exception as error:
        reason = f"the weights of the run are not those of its {_CONFIG} ({error!s:.200})"
        raise UsageError(f"{option}: {reason}; name the folder of the same model") from error
    written = {id(weights[name]) for name in weights if name in shapes}
    missing = [name for name in shapes if name not in weights]
    unknown = [name for name in weights if name not in shapes and id(weights[name]) not in written]
    others = [n for n in shapes if n in weights and tuple(weights[n].shape) != shapes[n]]
    for names, what in (
        (missing, "the run lacks {}"),
        (unknown, "it lacks {} of the run"),
        (others, "of another shape are {}"),
    ):
        if names:
            listed = some(names, _MOST_SHOWN)
            raise UsageError(
                f"{option}: its weights are not those of the run: {what.format(listed)}; name the "
                "folder of the same model"
            )
    return {name: tensor for name, tensor in weights.items() if name in shapes}


def _shapes(files: tuple[Path, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path in files:
        if path.suffix not in SAFETENSORS:
            raise UsageError(f"{path}: is no .safetensors file; save the model in that format")
        file = TensorFile(path, from_worker=False)
        for name in file:
            yield name, file.info(name)[1]


def copy_files(folder: Path, target: Path) -> list[Path]:
    """Copy the files of a model's folder besides its weights; return the copies.

    They are on disk when this returns. Raises OSError.
    """
    copies = []
    for path in sorted(folder.iterdir()):
        is_index = path.name.endswith(".index.json")
        if path.suffix not in _COPIED or is_index or not path.is_file():
            continue
        if path.stat().st_size <= _MOST_BYTES:
            with path.open("rb") as source, (target / path.name).open("xb") as copy:
                shutil.copyfileobj(source, copy)
                sync_file(copy)
            copies.append(target / path.name)
    return copies
